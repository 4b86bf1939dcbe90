"""Sweeps of very short runs on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from common.runs.folder import read_json, write_json
from tests.harness.commands import execution, in_process_calls
from tests.harness.commands.exit_status import Completed
from tests.harness.commands.processes import make_environment
from tests.harness.runs.synthetic_runs import SyntheticRun

DIVERGING_SETTINGS = {"steps": "40", "optim.decay": "constant", "optim.weight_decay": "10"}
"""Settings with which a run diverges if its learning rate is 100."""
TINY_RUN_SETTINGS = {
    "width": "8", "stages": "1", "steps": "6", "batch": "64", "log.progress": "none", "data.name": "digits",
    "launch.threads": "1",  # three tests run at the same time
}  # fmt: skip


def write_grid(folder: Path, cache: Path, **grid: Any) -> Path:
    """Write the file of a grid. Its runs will be in the same folder."""
    settings = TINY_RUN_SETTINGS | {"data.test_limit": "50", "data.cache": str(cache), "runs": str(folder / "runs")}
    grid = {"experiment": "mnist_pipeline"} | grid
    grid["settings"] = settings | grid.get("settings", {})
    file = folder / "rates.yaml"
    file.write_text(yaml.safe_dump(grid))
    return file


def run_sweep(file: Path, *options: str, real_process: bool = False, status: int = 0) -> Completed:
    """Execute `slurm sweep`, as a real process or as a fork of the fork server, and check its exit status.

    Each run is a separate process.
    """
    argv = [sys.executable, "-m", "slurm", "sweep", "--launch=local", *options, "--", str(file)]
    return execution.execute_command(
        argv, env=make_environment(), timeout=200, real_process=real_process, status=status
    )


def read_cells(file: Path) -> list[dict[str, Any]]:
    """Return the cells of the sweep of a grid: each point with its run and state."""
    sweep_folder = file.parent / "runs" / "sweeps" / "rates"
    sweep_record = read_json(sweep_folder / "sweep.json")
    return list(sweep_record["cells"])


def check_failed_point_is_repeated(file: Path, failed_run: str) -> list[dict[str, Any]]:
    """Run the failed second point of a sweep again, which diverges again; return the cells of the sweep."""
    repeated = run_sweep(file, "--failed=1", status=1)
    assert "1 to run now" in repeated.stdout, repeated.stdout + repeated.stderr
    _, failed, *_ = read_cells(file)
    assert failed["state"] == "failed", "the point diverges again"
    assert failed["earlier"] == [failed_run]
    assert failed["run"] != failed_run
    runs_folder = file.parent / "runs"
    compared = in_process_calls.call_verb("compare", f"--runs-folder={runs_folder}", "--sweep=rates", "--json=1")
    for cell in read_cells(file):
        assert cell["run"] in compared.stdout
    return read_cells(file)


def write_interrupted_sweep(
    folder: Path, points: list[dict[str, str]], *states: str, experiment: str = "mnist_pipeline"
) -> list[str]:
    """Write an interrupted sweep whose runs have these states, one for each of the first points; return their names."""
    names = []
    running_cells = []
    for number, state in enumerate(states):
        run = SyntheticRun(experiment, number, 10, state=state).write(folder / "runs")
        names.append(run.path.name)
        if number < len(points):
            running_cells.append({"values": points[number], "repeat": 0, "run": run.path.name, "state": "running"})
    sweep_folder = folder / "runs" / "sweeps" / "rates"
    sweep_folder.mkdir(parents=True)
    write_json(sweep_folder / "sweep.json", {"experiment": experiment, "cells": running_cells})
    return names
