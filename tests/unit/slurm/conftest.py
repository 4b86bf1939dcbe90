"""SLURM's commands as scripts, and what else several tests of slurm need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.runs.folder import RunFolder
from slurm.scheduling import scheduler
from tests.harness.slurm.fake_slurm import FakeSlurm


@pytest.fixture
def fake(tmp_path: Path) -> FakeSlurm:
    """SLURM's commands for processes that a test starts."""
    return FakeSlurm(tmp_path)


@pytest.fixture
def fake_here(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """SLURM's commands for functions that a test calls in its own process, without cached answers."""
    monkeypatch.setenv("PATH", f"{fake.bin_folder}:{os.environ['PATH']}")
    monkeypatch.setattr(scheduler, "FAILURE_CACHE", {})
    monkeypatch.setattr(scheduler, "QUEUE_CACHE", {})
    monkeypatch.setattr(scheduler, "CLUSTER_NAME_CACHE", {})
    return fake


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder that contains the run folders of a test."""
    return tmp_path / "runs"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """The folder of a run that has not started."""
    return RunFolder.create(tmp_path, "mnist_pipeline", "")
