"""Errors of an experiment's own code: each is shown as it is, and ends the run with a status that is not 0."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.harness import warm
from tests.harness.long_runs import free_port
from tests.harness.processes import PATIENCE, Done, environment


def run_with_error(case: str, words: tuple[str, ...], runs: Path, **variables: str) -> Done:
    """Run an experiment whose code raises an error (see tests/harness/errors_of_users.py)."""
    argv = [sys.executable, "-m", "tests.harness.errors_of_users", f"runs={runs}", *words]
    done = warm.execute(argv, env=environment(ERROR_OF_USER=case, **variables), timeout=PATIENCE)
    return Done(done.returncode, done.stdout, done.stderr, runs)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_after_the_report_fails_the_command_and_keeps_the_result(
    rank: int, tmp_path: Path, quick: tuple[str, ...]
) -> None:
    done = run_with_error(f"after_report_{rank}", (*quick, "steps=3"), tmp_path)
    assert done.status == 1
    assert "ValueError: the plot has no axes" in done.err and f"error: rank {rank} failed as shown above" in done.err
    assert f"the error occurred after the result was written: {done.folder.path}/result.json\n" in done.err
    assert done.folder.result["state"] == "finished" and "resume" not in done.err


def test_a_timeout_in_the_code_of_an_experiment_is_not_that_of_a_rank(tmp_path: Path, quick: tuple[str, ...]) -> None:
    done = run_with_error("timeout", quick, tmp_path)
    assert done.status == 1
    assert "TimeoutError: the label server did not answer within 3 s" in done.err
    assert "rank 0 on" not in done.err
    assert done.folder.result["cause"] == "other"


@pytest.mark.parametrize(("case", "reason"), [("pipe", "Broken pipe"), ("disk", "No space left on device")])
def test_a_run_whose_output_cannot_be_written_goes_on_and_may_end_with_sys_exit(
    case: str, reason: str, tmp_path: Path, quick: tuple[str, ...]
) -> None:
    done = run_with_error(case, (*quick, "steps=3"), tmp_path)
    assert done.status == 0 and done.folder.result["state"] == "finished"
    assert not list(done.folder.path.glob("attempts/*/failure-*"))
    assert done.err == f"WARNING: cannot write standard output ({reason}); the run continues, see its run folder\n"


def test_a_rank_of_torchrun_that_exits_records_its_own_status(tmp_path: Path, quick: tuple[str, ...]) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = run_with_error("exit", (*quick, "stages=1"), tmp_path, **place)
    assert done.status == 2, "the status of a refusal, which would delete the folder of the run"
    result = done.folder.result
    assert (result["state"], result["exit_status"], result["cause"]) == ("failed", 2, "exited")
    assert result["reason"] == "exited with status 2 without an error message"
