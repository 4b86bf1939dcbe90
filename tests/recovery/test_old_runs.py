"""Runs of older versions are listed, compared and evaluated, and are resumed and repeated with their own source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.runs.folder import RunFolder
from tests.harness.commands import in_process_calls
from tests.harness.commands.exit_status import Completed
from tests.harness.commands.processes import execute_verb, make_environment, read_result_values
from tests.harness.old_runs import VERSIONS, unpack
from tests.harness.repository import ROOT


def call(folder: Path, *arguments: str, status: int | None = 0) -> Completed:
    """Execute a current command in a folder with old runs. The processes that it starts use the old sources."""
    return execute_verb(*arguments, cwd=folder, env=make_environment(PYTHONPATH=str(ROOT)), timeout=200, status=status)


def losses(folder: RunFolder) -> dict[int, float]:
    return {row["global_step"]: row["loss"] for row in folder.read_rows() if "loss" in row}


@pytest.mark.parametrize("version", VERSIONS)
def test_old_runs_are_listed_compared_and_evaluated(version: str, tmp_path: Path) -> None:
    stopped, finished = unpack(version, tmp_path)
    status = in_process_calls.call_verb("status", "--json=1", cwd=tmp_path)
    states = {run["run"]: run["state"] for run in json.loads(status.stdout)}
    assert states == {stopped.path.name: "cancelled", finished.path.name: "finished"}

    compared = in_process_calls.call_verb("compare", cwd=tmp_path, COLUMNS="200")  # wide enough for all columns
    (line,) = (line for line in compared.stdout.splitlines() if line.startswith(finished.path.name))
    accuracy = read_result_values(finished)["test_accuracy"]
    assert f"{accuracy:.2%}" in line, compared.stdout + compared.stderr
    assert "fc2" in line, compared.stdout + compared.stderr

    evaluated = in_process_calls.call_verb("evaluate", "--", finished.path.name, cwd=tmp_path)
    correct_samples = round(accuracy * read_result_values(finished)["test_samples"])
    assert f"recorded by the run: {correct_samples}" in evaluated.stdout, evaluated.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_an_old_run_is_resumed_and_repeated(version: str, tmp_path: Path) -> None:
    stopped, finished = unpack(version, tmp_path)
    call(tmp_path, "exp", f"--resume={stopped.path.name}", "--launch=local")
    assert stopped.result["state"] == "finished"
    assert losses(stopped).keys() == losses(finished).keys()
    arguments = ("rerun", "--launch=local", "--", finished.path.name)
    repeated = call(tmp_path, *arguments, status=None)  # another processor may round differently
    assert "60 steps" in repeated.stdout, repeated.stdout + repeated.stderr
    run_paths = set((tmp_path / "runs").glob("mnist_pipeline-*"))
    (new_path,) = run_paths - {stopped.path, finished.path}
    for run in (stopped, RunFolder(new_path)):
        assert losses(run) == pytest.approx(losses(finished), rel=1e-4)
        assert read_result_values(run)["test_loss"] == pytest.approx(
            read_result_values(finished)["test_loss"], rel=1e-4
        )
