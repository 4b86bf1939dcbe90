"""A loss of NaN or infinity fails a run with a reason, and is in no checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from common.checkpoint import storage
from tests.harness.commands.processes import Settings, run_experiment


def test_divergence_in_the_last_steps_fails_the_run(tmp_path: Path, quick: Settings) -> None:
    settings = (*quick, "checkpoint.every_steps=0", "optim.lr=30", "steps=13")
    completed = run_experiment("mnist_pipeline", *settings, runs=tmp_path, status=2)
    assert "the loss of step" in completed.stderr
    assert completed.folder.result["state"] == "failed"
    assert completed.folder.result["cause"] == "diverged"


def test_divergence_stops_a_long_run_and_is_in_no_checkpoint(tmp_path: Path, quick: Settings) -> None:
    settings = (*quick, "checkpoint.every_steps=1", "optim.lr=100", "epochs=100", "steps=0")
    completed = run_experiment("mnist_pipeline", *settings, runs=tmp_path, status=2)
    assert "the loss of step" in completed.stderr
    assert "positions" in completed.stderr
    assert "lower optim.lr" in completed.stderr
    (attempt,) = completed.folder.list_attempts()
    checkpoints = storage.list_checkpoints(attempt)
    assert checkpoints
    for checkpoint in checkpoints:
        files = list(checkpoint.path.glob("rank-*.pt"))
        assert len(files) == 2
        for file in files:
            part = torch.load(file, weights_only=True)
            assert all(value.isfinite().all() for value in part["model"].values()), file
