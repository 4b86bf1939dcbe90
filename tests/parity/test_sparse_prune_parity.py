"""Clipping and dropout of sparse_prune do not depend on the number of ranks, in float64, to 1e-9."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.commands.processes import FinishedRun, run_experiment
from tests.harness.parity.reference import TOLERANCE

SETTINGS = (
    "dtype=float64",
    "model=mlp",
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
    def train(ranks: int, *settings: str) -> FinishedRun:
        arguments = (*digits, *SETTINGS, *settings, f"processes_per_node={ranks}")
        completed = run_experiment("sparse_prune", *arguments, runs=tmp_path / f"{ranks}{len(settings)}")
        assert completed.returncode == 0, completed.stderr
        return completed

    single = train(1, "clip=0.5", "dropout=0.2")
    both = train(2, "clip=0.5", "dropout=0.2")
    assert both.losses == pytest.approx(single.losses, abs=TOLERANCE, rel=0)
    assert both.result["test_loss"] == pytest.approx(single.result["test_loss"], abs=TOLERANCE, rel=0)
    assert train(1).losses[1:] != pytest.approx(single.losses[1:], abs=1e-6, rel=0)
