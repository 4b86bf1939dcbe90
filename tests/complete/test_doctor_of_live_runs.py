"""`make doctor` on this machine, and on runs with a slow rank. With a hung rank: tests/experiments/test_stopping.py."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.harness.commands import in_process_calls
from tests.harness.commands.doctor_reports import leave_out_speed_problems
from tests.harness.commands.processes import execute_verb, get_only_run
from tests.harness.environment.randomness import draw_cases
from tests.harness.runs.long_runs import list_rank_pids, start_long_run


def test_this_machine_passes_all_checks(cache: Path, tmp_path: Path) -> None:
    settings = f"--args=runs={tmp_path / 'runs'} data.cache={cache}"
    completed = execute_verb("doctor", "--nodes=2", settings, real_process=True, status=None)
    lines = completed.stdout.splitlines()
    problems = [line for line in lines if line.startswith("problem: ")]
    assert leave_out_speed_problems(problems) == [], completed.stderr
    assert completed.returncode == (1 if problems else 0)
    assert lines[4] == "W&B mode of new runs: disabled"
    assert len(lines) == 6 + len(problems)
    assert lines[-1] == "all checks passed" or problems
    assert "all_reduce_gb_per_s" in lines[1]
    assert "gflop_per_s" in lines[1]
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("strategy", draw_cases("strategies with a slow rank", ["ddp", "fsdp"], 1))
def test_a_straggler_is_named_while_the_run_trains(strategy: str, cache: Path, tmp_path: Path) -> None:
    data = ("data.name=digits", f"data.cache={cache}")
    arguments = (*data, "batch=64", "epochs=100", "log.progress=none", f"strategy={strategy}")
    with start_long_run("ddp_multinode", *arguments, runs=tmp_path) as process:
        folder = get_only_run(tmp_path)
        slow_rank = list_rank_pids(process)[1]
        deadline = time.monotonic() + 120
        diagnosis = ""
        while "rank 1 on " not in diagnosis:
            assert time.monotonic() < deadline, diagnosis
            throttle(slow_rank, 1)
            diagnosis = in_process_calls.call_verb("doctor", f"--run={folder.path}").stdout
        expected = r"rank 1 on \S+ is slow: backward starts after \S+ ms, compared with \S+ ms"
        assert re.search(expected, diagnosis), diagnosis
        status = in_process_calls.call_verb("status", str(folder.path))
        assert "RUNNING" in status.stdout, status.stdout
        assert "rank 1 on " in status.stdout, status.stdout


def throttle(pid: int, seconds: float) -> None:
    """Let a process run for a quarter of the time only."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.045)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.015)
