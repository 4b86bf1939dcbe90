"""Runs of older versions are listed, compared and evaluated, and are resumed and repeated with their own source."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.runs.folder import RunFolder
from tests.harness.commands import execution, in_process_calls
from tests.harness.commands.processes import make_environment, read_result_values
from tests.harness.old_runs import VERSIONS, unpack
from tests.harness.repository import ROOT


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Execute a current command in a folder with old runs. The processes that it starts use the old sources."""
    command = [sys.executable, "-m", *arguments]
    return execution.execute_command(command, cwd=folder, env=make_environment(PYTHONPATH=str(ROOT)), timeout=200)


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
    resumed = call(tmp_path, "slurm", "exp", f"--resume={stopped.path.name}", "--launch=local")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert stopped.result["state"] == "finished"
    assert losses(stopped).keys() == losses(finished).keys()
    repeated = call(tmp_path, "slurm", "rerun", "--launch=local", "--", finished.path.name)
    assert "60 steps" in repeated.stdout, repeated.stdout + repeated.stderr
    run_paths = set((tmp_path / "runs").glob("mnist_pipeline-*"))
    (new_path,) = run_paths - {stopped.path, finished.path}
    for run in (stopped, RunFolder(new_path)):  # another processor may round differently
        assert losses(run) == pytest.approx(losses(finished), rel=1e-4)
        assert read_result_values(run)["test_loss"] == pytest.approx(
            read_result_values(finished)["test_loss"], rel=1e-4
        )
