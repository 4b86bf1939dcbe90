"""A run whose data workers hang or die ends with a message; the resumed run is bitwise equal."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.checkpoint import storage
from common.runs.folder import RunFolder
from common.system.exit_status import EXIT_RESUMABLE
from slurm.reports.diagnosis import collect_diagnosis
from tests.harness.commands.execution import Command, execute_command, kill_session
from tests.harness.commands.processes import (
    WAIT_TIMEOUT,
    Settings,
    get_only_run,
    make_environment,
    run_experiment,
    wait_until,
)
from tests.harness.environment.control_groups import create_control_group
from tests.harness.repository import ROOT
from tests.harness.runs.long_runs import list_rank_pids, start_long_run
from tests.harness.runs.resuming import read_compared_rows

STEPS = 1500
SETTINGS = ("stages=1", "microbatches=1", "data.workers=1", "checkpoint.every_steps=50", "log.seconds=0.05")


def signal_worker(process: Command, number: int) -> None:
    """Send a signal to the data worker of rank 0."""
    rank = list_rank_pids(process)[0]
    children = Path(f"/proc/{rank}/task/{rank}/children")
    (worker,) = wait_until(lambda: children.read_text().split(), "the rank has a worker")
    os.kill(int(worker), number)


def count_steps(folder: RunFolder) -> int:
    return sum("loss" in row for row in folder.read_metrics())


def resume_command(folder: RunFolder) -> list[str]:
    return [sys.executable, str(ROOT / "experiments" / "mnist_pipeline.py"), "--resume", str(folder.path)]


def test_a_run_survives_workers_that_hang_and_die(tmp_path: Path, digits: Settings) -> None:
    settings = (*digits, *SETTINGS, f"steps={STEPS}")
    uninterrupted = run_experiment("mnist_pipeline", *settings, runs=tmp_path / "uninterrupted")

    with start_long_run("mnist_pipeline", *settings, runs=tmp_path / "runs") as process:
        signal_worker(process, signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(WAIT_TIMEOUT)
        assert process.returncode == EXIT_RESUMABLE, out + err
    folder = get_only_run(tmp_path / "runs")
    newest_step = storage.list_resumable_checkpoints(folder)[0].step
    assert newest_step == count_steps(folder), "no step is lost, though the rank waits for a stopped worker"
    assert newest_step < STEPS

    process = Command(resume_command(folder), env=make_environment(), new_session=True)
    try:
        wait_until(lambda: process.poll() is not None or count_steps(folder) > newest_step, "the run continues")
        signal_worker(process, signal.SIGKILL)
        out, err = process.communicate(WAIT_TIMEOUT)
    finally:
        kill_session(process.pid)
    assert process.returncode == 1, out + err
    assert "was killed by SIGKILL" in err, err
    assert "data worker 0" in err, err
    assert "Traceback" not in err, err
    assert "resume with: make exp RESUME=" in err

    execute_command(resume_command(folder), env=make_environment(), timeout=120, status=0)
    assert read_compared_rows(folder) == read_compared_rows(uninterrupted.folder)


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group that limits threads and processes."""
    with create_control_group("pids", {"pids.max": "max"}) as path:
        yield path


def test_a_run_that_cannot_fork_a_worker_names_the_limit(tmp_path: Path, digits: Settings, group: Path) -> None:
    epochs = ("data.train_limit=3200", "data.test_limit=100", "epochs=12")
    settings = (*digits, *SETTINGS, *epochs, "steps=0")
    uninterrupted = run_experiment("mnist_pipeline", *settings, runs=tmp_path / "uninterrupted")

    with start_long_run("mnist_pipeline", *settings, runs=tmp_path / "runs") as process:
        folder = get_only_run(tmp_path / "runs")
        wait_until(lambda: storage.list_resumable_checkpoints(folder), "a checkpoint is saved")
        for pid in (process.pid, *list_rank_pids(process)):
            (group / "cgroup.procs").write_text(str(pid))
        (group / "pids.max").write_text("1")
        out, err = process.communicate(WAIT_TIMEOUT)
        assert process.returncode == 1, out + err
    (message,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "rank 0 failed: no more threads or processes can be started: pids.max of control group" in message
    assert "Traceback" not in err, err
    assert "restart from step 0" not in err, err
    assert "resume with: make exp RESUME=" in err, err

    assert "no more threads or processes can be started; raise" in collect_diagnosis(folder)["cause"]
    execute_command(resume_command(folder), env=make_environment(), timeout=120, status=0)
    assert read_compared_rows(folder) == read_compared_rows(uninterrupted.folder)
