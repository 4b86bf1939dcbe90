"""Clipping and dropout of sparse_prune do not depend on the number of ranks, in float64, to 1e-9."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.commands.processes import FinishedRun, run_experiment
from tests.harness.parity.reference import TOLERANCE

SETTINGS = (
    "dtype=float64",
    "model=mlp",
    "clip=0.5",
    "dropout=0.2",
    "batch=24",
    "steps=12",
    "epochs=3",
    "data.train_limit=120",
    "data.test_limit=100",
    "optim.warmup=0",
    "every=4",
    "int8=false",
    "export=false",
)


def test_two_ranks_clip_and_drop_like_one(digits: tuple[str, ...], tmp_path: Path) -> None:
    def train(ranks: int) -> FinishedRun:
        arguments = (*digits, *SETTINGS, f"processes_per_node={ranks}")
        completed = run_experiment("sparse_prune", *arguments, runs=tmp_path / f"{ranks}")
        assert completed.returncode == 0, completed.stderr
        return completed

    single_process = train(1)
    two_ranks = train(2)
    assert two_ranks.losses == pytest.approx(single_process.losses, abs=TOLERANCE, rel=0)
    expected_loss = single_process.result["test_loss"]
    assert two_ranks.result["test_loss"] == pytest.approx(expected_loss, abs=TOLERANCE, rel=0)
