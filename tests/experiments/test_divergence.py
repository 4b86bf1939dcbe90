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
    completed = run_experiment(
        "mnist_pipeline", *quick, "optim.lr=100", "epochs=100", "steps=0", runs=tmp_path, status=2
    )
    assert "the loss of step" in completed.stderr
    assert "positions" in completed.stderr
    assert "lower optim.lr" in completed.stderr
    for attempt in completed.folder.list_attempts():
        for checkpoint in storage.list_checkpoints(attempt):
            part = torch.load(checkpoint.path / "rank-0.pt", weights_only=True)
            for value in part["model"].values():
                assert value.isfinite().all(), checkpoint
