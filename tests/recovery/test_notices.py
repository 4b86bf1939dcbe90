"""A notice to stop, in time or told twice, and ranks that hang: what a run does, and that nothing of it is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common import snapshots
from common.errors import LEFT
from common.folder import Folder
from slurm import diagnosis, status
from tests.harness.processes import ROOT, command, environment, processes_of, run
from tests.harness.registry import EXPERIMENTS, Entry

every = pytest.mark.parametrize("entry", EXPERIMENTS, ids=lambda entry: entry.name)


@pytest.fixture
def start(quick: tuple[str, ...]) -> Iterator[Any]:
    """Starts a run that would take minutes, and catches it in training; none outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(entry: Entry, runs: Path, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command(entry.name, *quick, "steps=0", "epochs=5000", "checkpoint.every_steps=0", *words, runs=runs),
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )
        started.append(process)
        while not any(file.stat().st_size for file in runs.glob("*/attempts/0001/metrics.jsonl")):
            assert process.poll() is None
            time.sleep(0.05)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM, signal.SIGINT])
@every
def test_a_notice_saves_and_leaves(entry: Entry, number: signal.Signals, tmp_path: Path, start: Any) -> None:
    process = start(entry, tmp_path)
    time.sleep(random.random())
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == (128 + number if number == signal.SIGINT else LEFT), out + err
    assert "Traceback" not in err and "go on with: make exp RESUME=" in err
    (folder,) = (Folder(path) for path in tmp_path.iterdir())
    (snapshot,) = snapshots.candidates(folder)
    assert snapshot.step == max(row["global_step"] for row in folder.metrics()), "no work is lost"
    assert folder.result["state"] == ("cancelled" if number == signal.SIGINT else "preempted")
    assert not processes_of(str(tmp_path))


def test_a_run_that_is_cancelled_saves_and_says_so(tmp_path: Path, start: Any) -> None:
    process = start(EXPERIMENTS[0], tmp_path)
    (folder,) = (Folder(path) for path in tmp_path.iterdir())
    assert status.cancel(folder).startswith("cancelled process ")
    process.communicate(timeout=30)
    assert process.returncode == LEFT and snapshots.candidates(folder)
    assert status.state_of(folder)[0] == "CANCELLED" and folder.result["exit_status"] == 130
    assert diagnosis.examine(folder)["cause"] == "it was cancelled"
    assert "after step" in status.what_rank_0_said(folder)
    waiting = folder.claim()  # a start that has said nothing yet hides no words of the one before
    (waiting.attempt / "logs").mkdir(exist_ok=True)
    waiting.log_file(0).touch()
    assert "after step" in status.what_rank_0_said(folder)


def test_without_a_checkpoint_it_says_that_it_begins_anew(tmp_path: Path, digits: tuple[str, ...]) -> None:
    begun = run("mnist_pipeline", *digits, "checkpoint.every_seconds=0", "steps=3", runs=tmp_path)
    (begun.folder.path / "result.json").unlink()
    done = run("mnist_pipeline", "--resume", str(begun.folder.path), runs=tmp_path)
    assert done.status == 0, done.err
    assert "has no checkpoint, and begins anew in run folder" in done.out
    assert len(done.losses) == 3


def test_told_twice_it_ends_at_once(tmp_path: Path, start: Any) -> None:
    process = start(EXPERIMENTS[0], tmp_path)
    os.kill(rank(process, 1), signal.SIGSTOP)  # so that nobody can save
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=5)
    assert process.returncode == 128 + signal.SIGINT and "stopped by Ctrl-C" in err and "Traceback" not in err
    assert not processes_of(str(tmp_path))


def test_nobody_waits_longer_than_the_grace_time(tmp_path: Path, start: Any) -> None:
    process = start(EXPERIMENTS[1], tmp_path, "checkpoint.grace=2", "launch.step_timeout=60")
    os.kill(rank(process, 1), signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode not in (0, LEFT)
    (log,) = tmp_path.glob("*/attempts/0001/logs/rank-0.log")
    assert "Timeout (0:00:02)" in log.read_text(), "the stacks of all threads"
    assert not processes_of(str(tmp_path))


@every
def test_a_rank_that_hangs_is_named(entry: Entry, tmp_path: Path, start: Any) -> None:
    process = start(entry, tmp_path, *entry.spread(2), "launch.step_timeout=3")
    os.kill(rank(process, 1), signal.SIGSTOP)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "rank 1 on" in err and "did not answer within 3 s" in err
    (log,) = tmp_path.glob("*/attempts/0001/logs/rank-0.log")
    assert "most recent call first" in log.read_text()
    assert not processes_of(str(tmp_path))


def rank(process: subprocess.Popen[str], number: int) -> int:
    """The pid of a rank."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[number])
