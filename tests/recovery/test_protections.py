"""Attempts and the vote of all ranks protect a run: the same disturbance with the protection and without it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.checkpoint import storage
from common.runs import claims
from common.runs.folder import RunFolder, write_atomic
from common.system.exit_status import EXIT_RESUMABLE
from tests.harness.commands.execution import Command, kill_session
from tests.harness.commands.processes import (
    WAIT_TIMEOUT,
    Settings,
    find_processes,
    get_only_run,
    make_environment,
    run_experiment,
    wait_until,
)
from tests.harness.repository import ROOT
from tests.harness.runs.long_runs import list_rank_pids

STEPS = 600
LENGTH = ("stages=1", "microbatches=1", f"steps={STEPS}", "epochs=100", "launch.threads=1")
SAVING = ("checkpoint.every_steps=100", "checkpoint.every_seconds=0", "log.seconds=0.05")


@contextlib.contextmanager
def started(*settings: str, without: str = "") -> Iterator[Command]:
    """Start mnist_pipeline in a new process group, without a protection."""
    argv = [sys.executable, "-m", "tests.harness.runs.disabled_protection", without]
    argv += [str(ROOT / "experiments" / "mnist_pipeline.py"), *settings]
    process = Command(argv, env=make_environment(), new_session=True)
    try:
        yield process
    finally:
        kill_session(process.pid)
        process.wait(WAIT_TIMEOUT)


def count_rows(runs: Path) -> int:
    """Return the number of rows that the first attempt has written."""
    return sum(len(list(RunFolder(path, 1).read_attempt_rows())) for path in runs.glob("*"))


def losses(folder: RunFolder) -> list[tuple[int, float]]:
    return [(row["global_step"], row["loss"]) for row in folder.read_metrics() if "loss" in row]


def hide_process(folder: RunFolder) -> None:
    """Remove the claim and the lock of the first attempt, as if its host were considered dead."""
    claims.mark_ended(folder.list_attempts()[0])
    config = folder.path / "config.yaml"
    write_atomic(config, config.read_text())


@pytest.mark.parametrize("without", ["", "attempts"], ids=["attempts", "no attempts"])
def test_an_attempt_that_was_frozen_stops_if_another_one_took_over(
    tmp_path: Path, digits: Settings, without: str
) -> None:
    """As a disconnected host: the scheduler considers it dead and starts the run on another one."""
    settings = (*digits, *LENGTH, *SAVING)
    undisturbed = run_experiment("mnist_pipeline", *settings, runs=tmp_path / "undisturbed")
    expected = losses(undisturbed.folder)
    assert [step for step, _ in expected] == list(range(1, STEPS + 1))

    runs = tmp_path / "runs"
    with started(f"runs={runs}", *settings, without=without) as frozen:
        wait_until(lambda: count_rows(runs) > 150, "the first attempt trains")
        os.killpg(frozen.pid, signal.SIGSTOP)
        folder = get_only_run(runs)
        assert not folder.result
        hide_process(folder)
        with started("--resume", str(folder.path), without=without) as successor:
            output, errors = successor.communicate(WAIT_TIMEOUT)
            assert successor.returncode == 0, output + errors
        final_result = folder.result
        os.killpg(frozen.pid, signal.SIGCONT)
        _, errors = frozen.communicate(WAIT_TIMEOUT)
    if without:
        assert losses(folder) != expected
        steps = [step for step, _ in losses(folder)]
        assert steps.count(STEPS) == 2, "both attempts wrote a row"
    else:
        assert losses(folder) == expected
        assert folder.result == final_result
        assert frozen.returncode == 2, errors
        assert f"attempt 1 of {folder.path.name} was superseded by attempt 2 on host" in errors


@pytest.mark.parametrize("without", ["", "vote"], ids=["vote", "no vote"])
def test_all_ranks_stop_if_one_gets_a_stop_request(tmp_path: Path, digits: Settings, without: str) -> None:
    timeout = 4.0
    settings = (*digits, "epochs=1000", "steps=0", f"launch.step_timeout={timeout}", "log.seconds=0.1")
    saving = ("checkpoint.every_seconds=0", "checkpoint.grace=30", "transport=network")
    with started(f"runs={tmp_path}", *settings, *saving, without=without) as process:
        wait_until(lambda: count_rows(tmp_path) > 100, "the run trains")
        folder = get_only_run(tmp_path)
        last_rank = max(list_rank_pids(process))
        request_time = time.monotonic()
        os.kill(last_rank, signal.SIGUSR2)
        _, errors = process.communicate(WAIT_TIMEOUT)
        seconds_to_end = time.monotonic() - request_time
    saved_steps = [checkpoint.step for checkpoint in storage.list_resumable_checkpoints(folder)]
    if without:
        assert process.returncode not in (0, EXIT_RESUMABLE)
        assert not saved_steps
        assert seconds_to_end > timeout / 2, "the ranks did not hang"
        assert "did not answer" in errors or "timed out" in errors.lower(), errors
    else:
        assert process.returncode == EXIT_RESUMABLE, errors
        last_step, _ = losses(folder)[-1]
        assert saved_steps == [last_step], "a step is lost"
    wait_until(lambda: not find_processes(str(tmp_path)), "no process is left")
