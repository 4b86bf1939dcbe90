"""A loss that is no number ends a run in time: with the reason, and without a checkpoint that holds it."""

from __future__ import annotations

from pathlib import Path

import torch

from common.checkpoint import storage
from tests.harness.processes import run


def test_a_loss_that_is_no_number_after_the_last_look_fails_the_run(tmp_path: Path, quick: tuple[str, ...]) -> None:
    done = run("mnist_pipeline", *quick, "checkpoint.every_steps=0", "optim.lr=30", "steps=13", runs=tmp_path)
    assert done.status == 2 and "the loss of step" in done.err
    assert done.folder.result["state"] == "failed" and done.folder.result["cause"] == "diverged"


def test_a_loss_that_is_no_number_stops_a_long_run_and_is_in_no_checkpoint(
    tmp_path: Path, quick: tuple[str, ...]
) -> None:
    done = run("mnist_pipeline", *quick, "optim.lr=100", "epochs=100", "steps=0", runs=tmp_path)
    assert done.status == 2 and "Traceback" not in done.err
    assert "the loss of step" in done.err and "positions" in done.err and "lower optim.lr" in done.err
    for attempt in done.folder.list_attempts():
        for checkpoint in storage.list_checkpoints(attempt):
            part = torch.load(checkpoint.path / "rank-0.pt", weights_only=True)
            assert all(value.isfinite().all() for value in part["model"].values()), checkpoint
