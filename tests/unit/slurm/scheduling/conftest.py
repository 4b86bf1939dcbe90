"""A job and its run, for tests of its script and of its ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.runs.folder import RunFolder
from tests.unit.slurm.scheduling.job_states import JOB


@pytest.fixture
def job_folder(runs: Path) -> RunFolder:
    """The folder of a run that was submitted as job 7 and may start twice in a row without a new checkpoint."""
    folder = RunFolder.create(runs, "mnist_pipeline", "")
    submit = folder.path / "submit"
    submit.mkdir()
    (submit / "config.yaml").write_text("checkpoint: {max_restarts: 1}\n")
    job = {"id": "7", "scheduler": "local", "profile": {"requeue": True}}
    (folder.path / "meta.json").write_text(json.dumps({"job": job}))
    return folder


@pytest.fixture
def inside_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment variables of job 7."""
    for name, text in JOB.items():
        monkeypatch.setenv(name, text)
