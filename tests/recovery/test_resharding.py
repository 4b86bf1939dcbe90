"""A run is resumed with other divisions of parameters and optimizer state, and equals an uninterrupted run to 1e-9."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.runs.folder import RunFolder
from tests.harness.commands.processes import Settings, run_experiment
from tests.harness.experiments.registry import REPLICATED_ENTRY
from tests.harness.runs.resuming import ONE_THREAD, copy_as_interrupted, resume_run

NAME = REPLICATED_ENTRY.name
STEPS = 20
MODEL = ("model=mlp", "dtype=float64", f"steps={STEPS}")
OPTIMIZER = ("optim.name=adam", "optim.lr=0.01", "clip=1")
HYBRID = ("strategy=fsdp", "fsdp=2", "reshard=false", "processes_per_node=4")
NOT_HYBRID = ("strategy=ddp", "fsdp=0", "reshard=true", "processes_per_node=3")


def read_losses(folder: RunFolder) -> list[float]:
    return [row["loss"] for row in folder.read_metrics() if "loss" in row]


def test_a_run_is_resumed_with_other_shards(tmp_path: Path, quick: Settings) -> None:
    settings = (*quick, ONE_THREAD, *MODEL, *OPTIMIZER)
    uninterrupted = run_experiment(NAME, *settings, *HYBRID, runs=tmp_path / "uninterrupted")
    expected = pytest.approx(uninterrupted.losses, abs=1e-9, rel=0)
    assert len(uninterrupted.losses) == STEPS

    def resume(folder: RunFolder, step: int, *changes: str) -> RunFolder:
        """Resume a copy of a run after a step with changed settings, and compare the losses."""
        copy = copy_as_interrupted(folder, step, tmp_path / str(step))
        resumed = resume_run(REPLICATED_ENTRY, copy, *changes)
        assert f"resumed from step {step}" in resumed.stdout
        assert read_losses(copy) == expected
        return copy

    divided = resume(uninterrupted.folder, 6, *NOT_HYBRID, "zero1=true")
    whole = resume(divided, 9, "zero1=false", "processes_per_node=2")
    divided_again = resume(whole, 12, "zero1=true")
    sharded = resume(divided_again, 15, "zero1=false", "strategy=fsdp")
    resume(sharded, 18, "strategy=ddp", "processes_per_node=1")
