"""`make rerun` reports differences: another seed, and another byte in the source of the data."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from common.data.sources import MNIST_FILES
from common.runs.folder import RunFolder
from slurm.launch import rerun
from tests.harness.commands import make_targets
from tests.harness.commands.exit_status import Completed
from tests.harness.commands.processes import execute_verb, make_environment, run_experiment

QUICK = ("steps=12", "data.test_limit=100", "log.progress=none")


def make_rerun(place: Path, folder: Path, *arguments: str) -> Completed:
    argv = ["make", "rerun", f"RUN={folder}", *arguments]
    return subprocess.run(
        argv, cwd=place, env=make_environment(), capture_output=True, text=True, timeout=200, check=False
    )


def list_differences(completed: Completed) -> list[str]:
    return re.findall(r"^differs     (.*)", completed.stdout, re.MULTILINE)


def read_losses(folder: RunFolder) -> list[float]:
    return [row["loss"] for row in folder.read_metrics() if "loss" in row]


def test_another_seed_and_its_largest_difference_are_reported(cache: Path, place: Path, tmp_path: Path) -> None:
    arguments = ("data.name=digits", f"data.cache={cache}", *QUICK)
    old = run_experiment("mnist_pipeline", *arguments, runs=tmp_path / "runs").folder
    slurm_arguments = make_targets.record_slurm_arguments(place, "rerun", f"RUN={old.path}", "ARGS=seed=1")
    completed = execute_verb(*slurm_arguments, status=rerun.DIFFERENT)
    assert list_differences(completed) == ["seed: was 0, now 1"]
    match = re.search(r"differ in 12 of 12 steps, first in step 1, by at most (\S+) \(step (\d+)\)", completed.stdout)
    assert match, completed.stdout
    reported_gap = float(match[1])
    reported_step = int(match[2])
    (new_path,) = (path for path in old.path.parent.iterdir() if path != old.path)
    new_losses = read_losses(RunFolder(new_path))
    gaps = [abs(a - b) for a, b in zip(read_losses(old), new_losses, strict=True)]
    assert reported_gap == pytest.approx(max(gaps), rel=1e-2)
    assert gaps[reported_step - 1] == max(gaps)
    assert re.search(r"result      test_loss: was \S+, now \S+, \S+ apart", completed.stdout)


def write_random_mnist(folder: Path) -> None:
    """Write files of MNIST's format and size with random images and labels."""
    random = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for name, size in MNIST_FILES.items():
        if "images" in name:
            header = [2051, (size - 16) // 784, 28, 28]
            limit = 255
        else:
            header = [2049, size - 8]
            limit = 10
        body = random.integers(0, limit, size - 4 * len(header), dtype=np.uint8)
        (folder / name).write_bytes(np.array(header, ">i4").tobytes() + body.tobytes())


@pytest.mark.drawn
def test_a_flipped_byte_in_the_source_of_the_data_is_reported(place: Path, tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    write_random_mnist(raw)
    arguments = (f"data.root={tmp_path}", f"data.cache={tmp_path / 'data'}", *QUICK)
    old = run_experiment("mnist_pipeline", *arguments, runs=tmp_path / "runs").folder
    with open(raw / "t10k-images-idx3-ubyte", "r+b") as file:
        file.seek(16 + 300)
        byte = file.read(1)[0]
        file.seek(16 + 300)
        file.write(bytes([byte ^ 128]))
    completed = make_rerun(place, old.path)
    assert f"Error {rerun.DIFFERENT}" in completed.stderr, completed.stdout + completed.stderr
    (line,) = list_differences(completed)
    assert line.startswith("data test_images of mnist")
    assert "losses      bitwise equal in 12 steps" in completed.stdout
    assert "result      test_loss: was " in completed.stdout
