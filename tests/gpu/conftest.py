"""Fixtures of the tests on GPUs. All of them are skipped on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.commands.processes import Settings
from tests.harness.gpu.gpu_runs import DEVICE
from tests.harness.gpu.visible_gpus import get_hidden_gpus


@pytest.fixture(autouse=True)
def visible_gpu() -> None:
    """Skip the test if no GPU is visible."""
    if DEVICE == "cuda" and not get_hidden_gpus():
        pytest.skip("no NVIDIA GPU is visible")


@pytest.fixture
def small(cache: Path) -> Settings:
    """Ten steps on 320 digits, with a checkpoint after every third step, all of which are kept."""
    data = ("data.name=digits", f"data.cache={cache}", "data.train_limit=320", "data.test_limit=100")
    saving = ("checkpoint.every_steps=3", "checkpoint.every_seconds=0", "checkpoint.keep=100")
    return (*data, *saving, "batch=24", "steps=10", "optim.warmup=0", "log.progress=none", "launch.threads=1")


@pytest.fixture
def exact(small: Settings) -> Settings:
    """The same in float64, in which a different order of sums changes losses by less than 1e-9."""
    return (*small, "dtype=float64")
