"""`make sweep` on this machine: every point once, whatever interrupts it; and clear words for a file that is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.folder import Folder, read_json
from slurm import grid
from tests.harness.processes import ROOT, Done, environment

DIVERGES = {"steps": "40", "optim.decay": "constant", "optim.weight_decay": "10"}  # with a rate of 100
TINY = {"width": "8", "steps": "6", "batch": "64", "log.progress": "none", "data.name": "digits"}


def write(folder: Path, cache: Path, **tree: Any) -> Path:
    """A grid's file whose runs lie in its own folder."""
    settings = TINY | {"data.test_limit": "50", "data.cache": str(cache), "runs": str(folder / "runs")}
    tree = {"experiment": "mnist_pipeline"} | tree
    tree["settings"] = settings | tree.get("settings", {})
    file = folder / "rates.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def make_sweep(place: Path, file: Path, *words: str, target: str = "sweep") -> Done:
    done = subprocess.run(
        ["make", target, f"GRID={file}", *words],
        cwd=place,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr, file.parent / "runs")


def cells(file: Path) -> list[dict[str, Any]]:
    return list(read_json(file.parent / "runs" / "sweeps" / "rates" / "sweep.json")["cells"])


def test_only_what_is_missing_is_run_and_failed_ones_alone(place: Path, cache: Path) -> None:
    file = write(place, cache, grid={"optim.lr": ["0.01", "100"]}, settings=DIVERGES, parallel="2")
    first = make_sweep(place, file)
    assert first.status != 0, first.out
    states = {cell["values"]["optim.lr"]: cell["state"] for cell in cells(file)}
    assert states == {"0.01": "finished", "100": "failed"}, first.out + first.err
    runs = [cell["run"] for cell in cells(file)]
    more = write(place, cache, points=[{"optim.lr": "0.01"}, {"optim.lr": "100"}, {"optim.lr": "0.02"}],
                 settings=DIVERGES)  # fmt: skip
    second = make_sweep(place, more)
    assert "3 points of mnist_pipeline (1 finished, 1 failed, 1 missing); 1 to run now" in second.out, second.out
    assert second.status == 0 and [cell["run"] for cell in cells(file)][:2] == runs
    again = make_sweep(place, more, "FAILED=1")
    assert "1 to run now" in again.out
    assert cells(file)[1]["earlier"] == [runs[1]] and cells(file)[1]["run"] != runs[1]
    assert cells(file)[0]["run"] == runs[0] and len(list((place / "runs").glob("mnist_pipeline-*"))) == 4
    third = make_sweep(place, more)
    assert third.status == 0 and "0 to run now" in third.out
    compared = subprocess.run(
        ["make", "compare", "SWEEP=rates", "JSON=1"], cwd=place, env=environment(), capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip
    assert compared.returncode == 0, compared.stderr
    assert all(cell["run"] in compared.stdout for cell in cells(file))


def test_a_sweep_that_is_interrupted_goes_on(place: Path, cache: Path) -> None:
    file = write(place, cache, grid={"seed": ["1", "2", "3"]}, settings={"steps": "400", "epochs": "5"})
    words = [sys.executable, "-m", "slurm.sweep", "--launch=local", "--", str(file)]
    with subprocess.Popen(words, cwd=place, env=environment(PYTHONPATH=str(ROOT)), start_new_session=True) as sweep:
        deadline = time.monotonic() + 60
        while not list((place / "runs").glob("mnist_pipeline-*/attempts/0001/metrics.jsonl")):
            assert time.monotonic() < deadline and sweep.poll() is None
            time.sleep(0.1)
        os.killpg(sweep.pid, signal.SIGINT)
        assert sweep.wait(60) == 130
    (cell,) = cells(file)
    assert cell["state"] in ("cancelled", "finished")
    done = make_sweep(place, file)
    assert done.status == 0, done.out + done.err
    assert cells(file)[0]["run"] == cell["run"] and [c["state"] for c in cells(file)] == ["finished"] * 3
    for one in cells(file):
        rows = [row for row in Folder(place / "runs" / one["run"]).metrics() if "loss" in row]
        assert [row["global_step"] for row in rows] == list(range(1, 401))


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
    words = [sys.executable, "-m", "slurm.sweep", "--launch=local", "--", str(file)]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("option", ["--help", "--print-config", "--config F", "--resume=F", "-h"])
def test_an_option_starts_no_sweep(tmp_path: Path, cache: Path, option: str) -> None:
    file = write(tmp_path, cache, points=[{"batch": "32"}])
    words = [sys.executable, "-m", "slurm.sweep", "--launch=local", f"--args=steps=5 {option}", "--", str(file)]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2 and f"ARGS: {option.split(maxsplit=1)[0]} is no setting" in done.stderr, done.stderr
    assert done.stderr.count("error: ") == 1 and not (tmp_path / "runs").exists()


def test_other_settings_under_the_same_name_are_refused(tmp_path: Path, cache: Path) -> None:
    file = write(tmp_path, cache, points=[{"batch": "32"}])
    folder = tmp_path / "runs" / "sweeps" / "rates"
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text(json.dumps({"experiment": "mnist_pipeline", "settings": {"steps": "7"}}))
    done = subprocess.run(
        [sys.executable, "-m", "slurm.sweep", "--launch=local", "--", str(file)],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "was begun with other settings" in done.stderr


def test_repeats_have_seeds_of_their_own(tmp_path: Path, cache: Path) -> None:
    found = grid.read(str(write(tmp_path, cache, grid={"batch": ["32", "64"]}, repeats="3")), ["seed=5"])
    assert [(p.values["batch"], p.settings.seed) for p in found.points] == [
        (batch, seed) for seed in (5, 6, 7) for batch in ("32", "64")
    ]


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "sweeps").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_grid_is_valid(file: Path) -> None:
    assert grid.read(str(file), []).points
    assert re.match(r"#.*make sweep GRID=configs/sweeps/", file.read_text())
