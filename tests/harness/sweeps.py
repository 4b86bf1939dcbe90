"""Sweeps of tiny runs on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from common.runs.folder import read_json, write_json
from tests.harness import warm
from tests.harness.made_runs import Made
from tests.harness.processes import environment

DIVERGES = {"steps": "40", "optim.decay": "constant", "optim.weight_decay": "10"}  # with a rate of 100
TINY = {
    "width": "8", "stages": "1", "steps": "6", "batch": "64", "log.progress": "none", "data.name": "digits",
    "launch.threads": "1",  # tests run three at a time
}  # fmt: skip


def write(folder: Path, cache: Path, **tree: Any) -> Path:
    """A grid's file whose runs lie in its own folder."""
    settings = TINY | {"data.test_limit": "50", "data.cache": str(cache), "runs": str(folder / "runs")}
    tree = {"experiment": "mnist_pipeline"} | tree
    tree["settings"] = settings | tree.get("settings", {})
    file = folder / "rates.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def sweep(file: Path, *words: str, real: bool = False) -> subprocess.CompletedProcess[str]:
    """The command, as a fork of a warm process if not `real`; the runs that it starts are processes of their own."""
    argv = [sys.executable, "-m", "slurm", "sweep", "--launch=local", *words, "--", str(file)]
    return warm.execute(argv, env=environment(), timeout=200, real=real)


def cells(file: Path) -> list[dict[str, Any]]:
    return list(read_json(file.parent / "runs" / "sweeps" / "rates" / "sweep.json")["cells"])


def begin(folder: Path, points: list[dict[str, str]], *states: str) -> list[str]:
    """Lay out a sweep that was begun, with runs of the first points that ended so; returns their names."""
    made = [Made("mnist_pipeline", number, 10, state=state) for number, state in enumerate(states)]
    runs = [one.write(folder / "runs").path.name for one in made]
    begun = [
        {"values": point, "repeat": 0, "run": run, "state": "running"} for point, run in zip(points, runs, strict=False)
    ]
    place = folder / "runs" / "sweeps" / "rates"
    place.mkdir(parents=True)
    write_json(place / "sweep.json", {"experiment": "mnist_pipeline", "cells": begun})
    return runs
