"""What attempts and the vote of all ranks protect from: the same disturbance with the protection and without it."""

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
from tests.harness.long_runs import only_folder, ranks_of
from tests.harness.processes import PATIENCE, environment, processes_of, run, wait_until
from tests.harness.warm import ROOT, Command, end_session

STEPS = 600


@contextlib.contextmanager
def started(*settings: str, without: str = "") -> Iterator[Command]:
    """mnist_pipeline in a process group of its own, with a protection switched off."""
    argv = [sys.executable, "-m", "tests.harness.careless", without]
    argv += [str(ROOT / "experiments" / "mnist_pipeline.py"), *settings]
    process = Command(argv, env=environment(), session=True)
    try:
        yield process
    finally:
        end_session(process.pid)
        process.wait(PATIENCE)


def rows(runs: Path) -> int:
    """What the first start has written down."""
    return sum(len(list(RunFolder(path, 1).read_attempt_rows())) for path in runs.glob("*"))


def losses(folder: RunFolder) -> list[tuple[int, float]]:
    return [(row["global_step"], row["loss"]) for row in folder.read_metrics() if "loss" in row]


def hide_process(folder: RunFolder) -> None:
    """Let the first attempt look as if it were on a host that is taken for dead: without its claim and its lock."""
    claims.mark_ended(folder.list_attempts()[0])
    config = folder.path / "config.yaml"
    write_atomic(config, config.read_text())


@pytest.mark.parametrize("without", ["", "attempts"], ids=["attempts", "no attempts"])
def test_a_start_that_stood_still_and_wakes_up_stops_beside_the_one_that_took_over(
    tmp_path: Path, digits: tuple[str, ...], without: str
) -> None:
    """As a host that was cut off: the scheduler takes it for dead and starts the run elsewhere."""
    settings = (*digits, "stages=1", "microbatches=1", f"steps={STEPS}", "epochs=100", "launch.threads=1")
    settings = (*settings, "checkpoint.every_steps=100", "checkpoint.every_seconds=0", "log.seconds=0.05")
    right = losses(run("mnist_pipeline", *settings, runs=tmp_path / "right").folder)
    runs = tmp_path / "runs"
    with started(f"runs={runs}", *settings, without=without) as old:
        wait_until(lambda: rows(runs) > 150, "the first start trains")
        os.killpg(old.pid, signal.SIGSTOP)
        folder = only_folder(runs)
        assert not folder.result
        hide_process(folder)
        with started("--resume", str(folder.path), without=without) as new:
            said, errors = new.communicate(PATIENCE)
            assert new.returncode == 0, said + errors
        result = folder.result
        os.killpg(old.pid, signal.SIGCONT)
        _, errors = old.communicate(PATIENCE)
    assert [step for step, _ in right] == list(range(1, STEPS + 1))
    found = losses(folder)
    if without:
        assert found != right
        assert [step for step, _ in found].count(STEPS) == 2  # the rows of both
    else:
        assert found == right
        assert folder.result == result
        assert old.returncode == 2, errors
        assert f"attempt 1 of {folder.path.name} was superseded by attempt 2 on host" in errors


@pytest.mark.parametrize("without", ["", "vote"], ids=["vote", "no vote"])
def test_all_ranks_leave_when_one_is_told(tmp_path: Path, digits: tuple[str, ...], without: str) -> None:
    timeout = 4.0
    settings = (*digits, "epochs=1000", "steps=0", f"launch.step_timeout={timeout}", "log.seconds=0.1")
    settings = (*settings, "checkpoint.every_seconds=0", "checkpoint.grace=30", "transport=network")
    with started(f"runs={tmp_path}", *settings, without=without) as process:
        wait_until(lambda: rows(tmp_path) > 100, "it trains")
        folder = only_folder(tmp_path)
        last = max(ranks_of(process))
        told = time.monotonic()
        os.kill(last, signal.SIGUSR2)
        _, errors = process.communicate(PATIENCE)
        waited = time.monotonic() - told
    saved = storage.list_resumable_checkpoints(folder)
    if without:
        assert process.returncode not in (0, EXIT_RESUMABLE)
        assert not saved
        assert waited > timeout / 2  # it hung
        assert "did not answer" in errors or "timed out" in errors.lower() or "error" in errors, errors
    else:
        assert process.returncode == EXIT_RESUMABLE, errors
        assert [place.step for place in saved] == [losses(folder)[-1][0]]  # nothing is lost
    wait_until(lambda: not processes_of(str(tmp_path)), "no process is left")
