"""A run is resumed with other divisions of parameters and optimizer state, and equals an uninterrupted run to 1e-9."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.commands.processes import Settings, run_experiment
from tests.harness.experiments.registry import REPLICATED_ENTRY
from tests.harness.runs.resuming import ONE_THREAD, copy_as_interrupted, resume_run

STEPS = 20
HYBRID = ("strategy=fsdp", "fsdp=2", "reshard=false", "processes_per_node=4")
RESUMED_WITH = {
    6: ("strategy=ddp", "fsdp=0", "reshard=true", "zero1=true", "processes_per_node=3"),
    9: ("zero1=false", "processes_per_node=2"),
    12: ("zero1=true",),
    15: ("zero1=false", "strategy=fsdp"),
    18: ("strategy=ddp", "processes_per_node=1"),
}
"""Changed settings of each attempt, by the step after which it resumes."""


def test_a_run_is_resumed_with_other_shards(tmp_path: Path, quick: Settings) -> None:
    settings = ("dtype=float64", "model=mlp", "optim.name=adam", "optim.lr=0.01", "clip=1", f"steps={STEPS}")
    runs = tmp_path / "uninterrupted"
    uninterrupted = run_experiment(REPLICATED_ENTRY.name, *quick, ONE_THREAD, *settings, *HYBRID, runs=runs)
    folder = uninterrupted.folder
    for step, changed_settings in RESUMED_WITH.items():
        folder = copy_as_interrupted(folder, step, tmp_path / str(step))
        resumed = resume_run(REPLICATED_ENTRY, folder, *changed_settings)
        assert f"resumed from step {step}" in resumed.stdout
        losses = [row["loss"] for row in folder.read_metrics() if "loss" in row]
        assert losses == pytest.approx(uninterrupted.losses, abs=1e-9, rel=0)
        assert len(losses) == STEPS
