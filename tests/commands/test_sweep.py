"""`make sweep` on this machine: every point once, whatever interrupts it; and clear words for a file that is wrong."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import slurm.sweep
from common.folder import read_json, write_json
from slurm import compare, grid
from tests.harness import inside, warm
from tests.harness.made_runs import Made
from tests.harness.processes import ROOT, environment

DIVERGES = {"steps": "40", "optim.decay": "constant", "optim.weight_decay": "10"}  # with a rate of 100
TINY = {"width": "8", "stages": "1", "steps": "6", "batch": "64", "log.progress": "none", "data.name": "digits"}


def write(folder: Path, cache: Path, **tree: Any) -> Path:
    """A grid's file whose runs lie in its own folder."""
    settings = TINY | {"data.test_limit": "50", "data.cache": str(cache), "runs": str(folder / "runs")}
    tree = {"experiment": "mnist_pipeline"} | tree
    tree["settings"] = settings | tree.get("settings", {})
    file = folder / "rates.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def sweep(file: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command, as a fork of a warm process; the runs that it starts are processes of their own source."""
    argv = [sys.executable, "-m", "slurm.sweep", "--launch=local", *words, "--", str(file)]
    return warm.execute(argv, env=environment(), timeout=200)


def refused(file: Path, *words: str, cwd: Path = ROOT) -> str:
    """The one line that refuses a sweep."""
    done = inside.call(slurm.sweep.main, "--launch=local", *words, "--", str(file), cwd=cwd)
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def cells(file: Path) -> list[dict[str, Any]]:
    return list(read_json(file.parent / "runs" / "sweeps" / "rates" / "sweep.json")["cells"])


def test_only_what_is_missing_is_run_and_failed_ones_alone(tmp_path: Path, cache: Path) -> None:
    """One point is finished and one failed, two are missing and run at once; then the failed one begins anew."""
    points = [{"optim.lr": rate} for rate in ("0.01", "100", "0.02", "0.03")]
    file = write(tmp_path, cache, points=points, settings=DIVERGES, parallel="2")
    made = [Made("mnist_pipeline", number, 10, state=state) for number, state in enumerate(("finished", "failed"))]
    runs = [one.write(tmp_path / "runs").path.name for one in made]
    begun = [
        {"values": point, "repeat": 0, "run": run, "state": "running"} for point, run in zip(points, runs, strict=False)
    ]
    place = tmp_path / "runs" / "sweeps" / "rates"
    place.mkdir(parents=True)
    write_json(place / "sweep.json", {"experiment": "mnist_pipeline", "cells": begun})

    done = sweep(file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 points of mnist_pipeline (1 finished, 1 failed, 2 missing); 2 to run now" in done.stdout, done.stdout
    assert [cell["state"] for cell in cells(file)] == ["finished", "failed", "finished", "finished"]
    assert [cell["run"] for cell in cells(file)][:2] == runs
    again = sweep(file, "--failed=1")
    assert again.returncode == 1 and "1 to run now" in again.stdout, again.stdout + again.stderr
    first, failed, *others = cells(file)
    assert failed["state"] == "failed"  # the loss is no number, as before
    assert failed["earlier"] == [runs[1]] and failed["run"] != runs[1]
    assert first["run"] == runs[0] and len(list((tmp_path / "runs").glob("mnist_pipeline-*"))) == 5
    nothing = sweep(file)
    assert nothing.returncode == 0 and "0 to run now" in nothing.stdout
    compared = inside.call(compare.main, f"--runs={tmp_path / 'runs'}", "--sweep=rates", "--json=1")
    assert compared.returncode == 0, compared.stderr
    assert all(cell["run"] in compared.stdout for cell in (first, failed, *others))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"grdi": {}}, "unknown key grdi; did you mean grid?"),
        ({"experiment": ""}, "experiment is missing; write a line such as experiment: amp_accum"),
        ({"experiment": "mnist_pipelin"}, "no experiment 'mnist_pipelin'; did you mean mnist_pipeline?"),
        ({}, "0 points; name some in grid or points"),
        ({"grid": {"batch": "64"}}, "grid: batch: expected a list of values"),
        ({"grid": {"bath": ["64"]}}, "at bath=64: unknown key bath; did you mean batch?"),
        ({"grid": {"batch": ["64", "x"]}}, "at batch=x: batch=x: write a whole number"),
        ({"points": [{"batch": "4"}, {"batch": "4"}]}, "the point {'batch': '4'} is there more than once"),
        ({"points": [{"batch": "4"}], "repeats": "0"}, "repeats: '0' is no number from 1"),
        ({"points": [{"seed": "1"}], "repeats": "2"}, "repeats=2 chooses seeds, and so do the points"),
        ({"points": ["batch"]}, "points: expected `key: value`"),
        ({"points": [{"runs": "x"}], "settings": {"runs": "y"}}, "runs is the same for all points"),
        ([], "expected `key: value` lines"),
    ],
)
def test_a_wrong_file_is_refused_with_the_remedy(tmp_path: Path, tree: Any, message: str) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(yaml.safe_dump({"experiment": "mnist_pipeline"} | tree if isinstance(tree, dict) else tree))
    assert message in refused(file, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("option", ["--help", "--print-config", "--config F", "--resume=F", "-h"])
def test_an_option_starts_no_sweep(tmp_path: Path, cache: Path, option: str) -> None:
    file = write(tmp_path, cache, points=[{"batch": "32"}])
    assert f"ARGS: {option.split(maxsplit=1)[0]} is no setting" in refused(file, f"--args=steps=5 {option}")
    assert not (tmp_path / "runs").exists()


def test_other_settings_under_the_same_name_are_refused(tmp_path: Path, cache: Path) -> None:
    file = write(tmp_path, cache, points=[{"batch": "32"}])
    folder = tmp_path / "runs" / "sweeps" / "rates"
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text(json.dumps({"experiment": "mnist_pipeline", "settings": {"steps": "7"}}))
    assert "was begun with other settings" in refused(file)


def test_repeats_have_seeds_of_their_own(tmp_path: Path, cache: Path) -> None:
    found = grid.read(str(write(tmp_path, cache, grid={"batch": ["32", "64"]}, repeats="3")), ["seed=5"])
    assert [(p.values["batch"], p.settings.seed) for p in found.points] == [
        (batch, seed) for seed in (5, 6, 7) for batch in ("32", "64")
    ]


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "sweeps").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_grid_is_valid(file: Path) -> None:
    assert grid.read(str(file), []).points
    assert re.match(r"#.*make sweep GRID=configs/sweeps/", file.read_text())
