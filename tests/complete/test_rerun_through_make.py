"""`make rerun` of runs that really differ: another seed, and another byte in the source of the data."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from common.data.sources import MNIST_FILES
from common.runs.folder import RunFolder
from slurm.launch import rerun
from tests.harness import making, warm
from tests.harness.processes import environment, run

QUICK = ("steps=12", "data.test_limit=100", "log.progress=none")


def make_rerun(place: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = ["make", "rerun", f"RUN={folder}", *arguments]
    return subprocess.run(argv, cwd=place, env=environment(), capture_output=True, text=True, timeout=200, check=False)


def differing(completed: subprocess.CompletedProcess[str]) -> list[str]:
    return re.findall(r"^differs     (.*)", completed.stdout, re.MULTILINE)


def test_another_seed_is_named_and_how_far_it_leads(cache: Path, place: Path, tmp_path: Path) -> None:
    arguments = ("data.name=digits", f"data.cache={cache}", *QUICK)
    old = run("mnist_pipeline", *arguments, runs=tmp_path / "runs").folder
    handed_over = making.handed_over(place, "rerun", f"RUN={old.path}", "ARGS=seed=1")
    completed = warm.execute([sys.executable, "-m", "slurm", *handed_over], env=environment())
    assert completed.returncode == rerun.DIFFERENT, completed.stdout + completed.stderr
    assert differing(completed) == ["seed: was 0, now 1"]
    found = re.search(r"differ in 12 of 12 steps, first in step 1, by at most (\S+) \(step (\d+)\)", completed.stdout)
    assert found, completed.stdout
    (path,) = (path for path in old.path.parent.iterdir() if path != old.path)
    then, now = ([row["loss"] for row in f.read_metrics() if "loss" in row] for f in (old, RunFolder(path)))
    gaps = [abs(a - b) for a, b in zip(then, now, strict=True)]
    assert float(found[1]) == pytest.approx(max(gaps), rel=1e-2)
    assert gaps[int(found[2]) - 1] == max(gaps)
    assert re.search(r"result      test_loss: was \S+, now \S+, \S+ apart", completed.stdout)


def test_one_flipped_byte_of_the_source_of_the_data_is_named(place: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, size in MNIST_FILES.items():
        count = (size - 16) // 784 if "images" in name else size - 8
        head = [2051, count, 28, 28] if "images" in name else [2049, count]
        body = random.integers(0, 255 if "images" in name else 10, size - 4 * len(head), dtype=np.uint8)
        (raw / name).write_bytes(np.array(head, ">i4").tobytes() + body.tobytes())
    arguments = (f"data.root={tmp_path}", f"data.cache={tmp_path / 'data'}", *QUICK)
    old = run("mnist_pipeline", *arguments, runs=tmp_path / "runs").folder
    with open(raw / "t10k-images-idx3-ubyte", "r+b") as file:
        file.seek(16 + 300)
        byte = file.read(1)[0]
        file.seek(16 + 300)
        file.write(bytes([byte ^ 128]))
    completed = make_rerun(place, old.path)
    assert f"Error {rerun.DIFFERENT}" in completed.stderr, completed.stdout + completed.stderr
    (line,) = differing(completed)
    assert line.startswith("data test_images of mnist")
    assert "losses      bitwise equal in 12 steps" in completed.stdout
    assert "result      test_loss: was " in completed.stdout
