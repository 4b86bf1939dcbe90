"""A run whose data workers stop or die ends with a message, and resumes equal to the bit."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from common.checkpoint import storage
from common.core.errors import EXIT_RESUMABLE
from common.runs.folder import Folder
from tests.harness.long_runs import only_folder, ranks_of, train_long
from tests.harness.processes import PATIENCE, environment, run, wait_until
from tests.harness.resuming import numbers
from tests.harness.warm import ROOT, Command, end_session, execute

STEPS = 1500
SETTINGS = ("stages=1", "microbatches=1", "data.workers=1", "checkpoint.every_steps=50", "log.seconds=0.05")


def signal_worker(process: Command, number: int) -> None:
    """Send a signal to the data worker of the first rank."""
    rank = ranks_of(process)[0]
    file = Path(f"/proc/{rank}/task/{rank}/children")
    (worker,) = wait_until(lambda: file.read_text().split(), "the rank has a worker")
    os.kill(int(worker), number)


def count_steps(folder: Folder) -> int:
    return sum("loss" in row for row in folder.metrics())


def test_a_run_survives_workers_that_stop_and_die(tmp_path: Path, digits: tuple[str, ...]) -> None:
    words = (*digits, *SETTINGS, f"steps={STEPS}")
    whole = run("mnist_pipeline", *words, runs=tmp_path / "whole")
    assert whole.status == 0, whole.err

    with train_long("mnist_pipeline", *words, runs=tmp_path / "runs") as process:
        signal_worker(process, signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(PATIENCE)
        assert process.returncode == EXIT_RESUMABLE, out + err
    folder = only_folder(tmp_path / "runs")
    saved = storage.list_resumable_checkpoints(folder)[-1].step
    assert saved == count_steps(folder) < STEPS, "no step is lost, though the rank waits for a stopped worker"

    again = [sys.executable, str(ROOT / "experiments" / "mnist_pipeline.py"), "--resume", str(folder.path)]
    process = Command(again, env=environment(), session=True)
    try:
        wait_until(lambda: process.poll() is not None or count_steps(folder) > saved, "the run goes on")
        signal_worker(process, signal.SIGKILL)
        out, err = process.communicate(PATIENCE)
    finally:
        end_session(process.pid)
    assert process.returncode == 1, out + err
    assert "was killed by SIGKILL" in err and "data worker 0" in err and "Traceback" not in err, err
    assert "go on with: make exp RESUME=" in err

    done = execute(again, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    assert numbers(folder) == numbers(whole.folder)
