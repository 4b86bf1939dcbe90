"""What attempts and agreement protect from: the same disturbance with the protection and without it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common import snapshots
from common.errors import LEFT
from common.folder import Folder
from tests.harness.processes import ROOT, environment, processes_of, run

STEPS = 600
RUN = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
NO_ATTEMPTS = """
from common.folder import Folder
claim = Folder.claim
Folder.claim = lambda folder: folder.attempts()[-1] if folder.attempts() else claim(folder)
"""
NO_AGREEMENT = """
from common.preemption import Decision, SafePoints
def alone(points, step, diverged):
    points.next = step + 1
    told = bool(points.notice.number)
    return Decision(told, told, diverged)
SafePoints.agree = alone
"""


@contextlib.contextmanager
def started(*words: str, off: str = "") -> Iterator[subprocess.Popen[str]]:
    """mnist_pipeline in a process group of its own, with a protection switched off."""
    argv = [sys.executable, "-c", off + RUN, str(ROOT / "experiments" / "mnist_pipeline.py"), *words]
    env, pipe = environment(PYTHONPATH=str(ROOT)), subprocess.PIPE
    process = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def until(what: str, true: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def only_run(runs: Path) -> Folder:
    return Folder(next(runs.iterdir()))


def rows(runs: Path) -> int:
    """What the first start has written down."""
    return sum(len(Folder(path, 1).own_metrics()) for path in runs.glob("*"))


def losses(folder: Folder) -> list[tuple[int, float]]:
    return [(row["global_step"], row["loss"]) for row in folder.metrics() if "loss" in row]


@pytest.mark.parametrize("off", ["", NO_ATTEMPTS], ids=["attempts", "no attempts"])
def test_a_start_that_stood_still_and_wakes_up_writes_beside_the_one_that_took_over(
    tmp_path: Path, digits: tuple[str, ...], off: str
) -> None:
    """As a host that was cut off: the scheduler takes it for dead and starts the run elsewhere."""
    words = (*digits, "stages=1", "microbatches=1", f"steps={STEPS}", "epochs=100", "launch.threads=1")
    words = (*words, "checkpoint.every_steps=100", "checkpoint.every_seconds=0", "log.seconds=0.05")
    right = losses(run("mnist_pipeline", *words, runs=tmp_path / "right").folder)
    runs = tmp_path / "runs"
    with started(f"runs={runs}", *words, off=off) as old:
        until("the first start trains", lambda: rows(runs) > 150)
        os.killpg(old.pid, signal.SIGSTOP)
        folder = only_run(runs)
        assert not folder.result
        with started("--resume", str(folder.path), off=off) as new:
            said, errors = new.communicate(timeout=60)
            assert new.returncode == 0, said + errors
        result = folder.result
        os.killpg(old.pid, signal.SIGCONT)
        old.communicate(timeout=60)
    assert [step for step, _ in right] == list(range(1, STEPS + 1))
    found = losses(folder)
    if off:
        assert found != right and [step for step, _ in found].count(STEPS) == 2  # the rows of both
    else:
        assert found == right
        assert folder.result == result
        assert rows(runs) > STEPS  # it did wake up, and wrote to the end


@pytest.mark.parametrize("off", ["", NO_AGREEMENT], ids=["agreement", "no agreement"])
def test_all_leave_when_one_is_told(tmp_path: Path, digits: tuple[str, ...], off: str) -> None:
    timeout = 4.0
    words = (*digits, "epochs=1000", "steps=0", f"launch.step_timeout={timeout}", "log.seconds=0.1")
    words = (*words, "checkpoint.every_seconds=0", "checkpoint.grace=30", "transport=network")
    with started(f"runs={tmp_path}", *words, off=off) as process:
        until("it trains", lambda: rows(tmp_path) > 100)
        folder = only_run(tmp_path)
        last = max(int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        told = time.monotonic()
        os.kill(last, signal.SIGUSR2)
        _, errors = process.communicate(timeout=60)
        waited = time.monotonic() - told
    saved = snapshots.candidates(folder)
    if off:
        assert process.returncode not in (0, LEFT) and not saved and waited > timeout / 2  # it hung
        assert "did not answer" in errors or "timed out" in errors.lower() or "error" in errors, errors
    else:
        assert process.returncode == LEFT, errors
        assert [place.step for place in saved] == [losses(folder)[-1][0]]  # nothing is lost
    until("no process is left", lambda: not processes_of(str(tmp_path)), 10)
