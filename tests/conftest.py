"""Fixtures that every test may use."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from common.prepare import prepare_digits
from tests.harness.processes import ROOT, script
from tests.harness.shared import make_once

torch.set_num_threads(1)  # tests run two at a time, and threads that wait for each other burn the other's core


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the digits set, prepared once for all tests of all workers."""
    return make_once(tmp_path_factory, "prepared", prepare_digits)


@pytest.fixture
def digits(cache: Path) -> tuple[str, ...]:
    """Settings of a quick run on the digits set, with nothing left to chance or to the network."""
    return (
        "data.name=digits",
        f"data.cache={cache}",
        "data.test_limit=1000",
        "epochs=1",
        "steps=30",
        "log.progress=lines",
        "launch.threads=1",  # tests run two at a time
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder where make finds everything set up."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("Makefile", "requirements.txt"):
        shutil.copy(ROOT / name, folder)
    script(folder / ".venv/bin/python", f'PYTHONPATH="$BEFORE:{ROOT}" exec "{sys.executable}" "$@"')
    (folder / ".venv/.ready").touch()
    return folder


@pytest.fixture
def quick(cache: Path) -> tuple[str, ...]:
    """13 steps an epoch, a checkpoint every third step, all kept."""
    data = ("data.name=digits", f"data.cache={cache}", "data.train_limit=320", "data.test_limit=100")
    saving = ("checkpoint.every_steps=3", "checkpoint.every_seconds=0", "checkpoint.keep=100")
    quiet = ("log.progress=none", "launch.threads=1")
    return (*data, *saving, *quiet, "batch=24", "steps=30", "epochs=3", "optim.warmup=0")
