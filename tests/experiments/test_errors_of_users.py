"""Errors in the code of an experiment are shown with their traceback and end the run with a status other than 0."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.harness.commands import execution
from tests.harness.commands.processes import WAIT_TIMEOUT, FinishedRun, Settings, make_environment
from tests.harness.runs.long_runs import find_free_port


def run_with_error(case: str, settings: Settings, runs: Path, status: int | None, **variables: str) -> FinishedRun:
    """Run an experiment whose code raises an error (see tests/harness/commands/user_errors.py)."""
    argv = [sys.executable, "-m", "tests.harness.commands.user_errors", f"runs={runs}", *settings]
    env = make_environment(ERROR_OF_USER=case, **variables)
    completed = execution.execute_command(argv, env=env, timeout=WAIT_TIMEOUT, status=status)
    return FinishedRun(completed.returncode, completed.stdout, completed.stderr, runs)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_after_the_report_fails_the_command_and_keeps_the_result(
    rank: int, tmp_path: Path, quick: Settings
) -> None:
    completed = run_with_error(f"after_report_{rank}", (*quick, "steps=3"), tmp_path, 1)
    assert "ValueError: the plot has no axes" in completed.stderr
    assert f"error: rank {rank} failed as shown above" in completed.stderr
    assert f"the error occurred after the result was written: {completed.folder.path}/result.json\n" in completed.stderr
    assert completed.folder.result["state"] == "finished"
    assert "resume" not in completed.stderr


def test_a_timeout_in_the_code_of_an_experiment_is_not_that_of_a_rank(tmp_path: Path, quick: Settings) -> None:
    completed = run_with_error("timeout", quick, tmp_path, 1)
    assert "TimeoutError: the label server did not answer within 3 s" in completed.stderr
    assert "rank 0 on" not in completed.stderr
    assert completed.folder.result["cause"] == "other"


@pytest.mark.parametrize("case, reason", [("pipe", "Broken pipe"), ("disk", "No space left on device")])
def test_a_run_continues_if_its_output_cannot_be_written(
    case: str, reason: str, tmp_path: Path, quick: Settings
) -> None:
    completed = run_with_error(case, (*quick, "steps=3"), tmp_path, 0)
    assert completed.folder.result["state"] == "finished"
    assert not list(completed.folder.path.glob("attempts/*/failure-*"))
    assert (
        completed.stderr == f"WARNING: cannot write standard output ({reason}); the run continues, see its run folder\n"
    )


def test_a_rank_of_torchrun_that_exits_records_its_own_status(tmp_path: Path, quick: Settings) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    completed = run_with_error("exit", (*quick, "stages=1"), tmp_path, status=None, **variables)
    assert completed.returncode == 2, "the status of a refusal, which would delete the folder of the run"
    result = completed.folder.result
    assert (result["state"], result["exit_status"], result["cause"]) == ("failed", 2, "exited")
    assert result["reason"] == "exited with status 2 without an error message"
