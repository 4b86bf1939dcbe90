"""make doctor on runs of which one rank hangs or is slow."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

from slurm import doctor, status
from tests.harness import inside
from tests.harness.live_runs import ranks_of, running


def test_a_rank_that_hangs_is_named(digits: tuple[str, ...], tmp_path: Path) -> None:
    words = (*digits, "steps=100000", "epochs=300", "launch.step_timeout=15", "log.progress=none")
    with running("mnist_pipeline", *words, runs=tmp_path) as (process, folder):
        os.kill(ranks_of(process.pid)[1], signal.SIGSTOP)
        process.wait(120)
    done = inside.call(doctor.main, f"--run={folder.path}")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search("likely cause  .*rank 1 on .* did not answer within 15 s", done.stdout), done.stdout
    assert "stood at " in done.stdout


def test_a_straggler_is_named_while_the_run_goes_on(cache: Path, tmp_path: Path) -> None:
    words = ("data.name=digits", f"data.cache={cache}", "batch=128", "epochs=100", "log.progress=none")
    with running("ddp_multinode", *words, runs=tmp_path) as (process, folder):
        slow, deadline, found = ranks_of(process.pid)[1], time.monotonic() + 120, ""
        while "rank 1 on " not in found:
            assert time.monotonic() < deadline, found
            throttle(slow, 4)
            found = inside.call(doctor.main, f"--run={folder.path}").stdout
        assert re.search(r"rank 1 on \S+ is slow: \S+ ms until backward, the others \S+ ms", found), found
        shown = inside.call(status.main, "status", str(folder.path))
        assert "RUNNING" in shown.stdout and "rank 1 on " in shown.stdout, shown.stdout


def throttle(pid: int, seconds: float) -> None:
    """Let a process run for a quarter of the time only."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.06)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.02)
