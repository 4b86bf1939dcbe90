"""A run of gpt_parallel is resumed with other layouts, and equals an uninterrupted single process to 1e-9."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.commands.processes import Settings, run_experiment
from tests.harness.environment.randomness import draw_cases
from tests.harness.experiments.registry import ENTRY_BY_NAME
from tests.harness.runs.resuming import ONE_THREAD, copy_as_interrupted, load_final_state, resume_run

ENTRY = ENTRY_BY_NAME["gpt_parallel"]
STEPS = 20
TOLERANCE = 1e-9
SINGLE_PROCESS = ("tensor=1", "sequence=false", "fsdp=1", "reshard=true", "replicas=1")
LAYOUTS = (
    ("tensor=2", "sequence=true"),
    ("fsdp=2", "reshard=false"),
    ("replicas=2",),
    ("tensor=2", "fsdp=2"),
    (),
    ("fsdp=2", "replicas=2"),
    ("tensor=2",),
)
"""Layouts that resume a run, one after another. The first one resumes the run of a single process."""


def test_each_layout_continues_the_run_of_another_layout(tmp_path: Path, quick: Settings) -> None:
    length = (f"steps={STEPS}", "checkpoint.every_steps=2")
    settings = (*quick, "dtype=float64", ONE_THREAD, *length, *ENTRY.make_rank_settings(1))
    uninterrupted = run_experiment(ENTRY.name, *settings, runs=tmp_path / "uninterrupted")
    expected_state = load_final_state(uninterrupted.folder)
    folder = uninterrupted.folder
    for number, layout in enumerate(draw_cases("resumes with other layouts", LAYOUTS, 2)):
        step = 2 * (number + 1)
        folder = copy_as_interrupted(folder, step, tmp_path / str(number))
        resumed = resume_run(ENTRY, folder, *SINGLE_PROCESS, *layout)
        assert f"resumed from step {step}" in resumed.stdout, layout
        losses = [row["loss"] for row in folder.read_metrics() if "loss" in row]
        assert losses == pytest.approx(uninterrupted.losses, abs=TOLERANCE, rel=0), layout
        assert len(losses) == STEPS
        scores = folder.result["scores"]
        assert scores == pytest.approx(uninterrupted.folder.result["scores"], abs=TOLERANCE, rel=0), layout
        state = load_final_state(folder)
        assert state.keys() == expected_state.keys()
        for name, tensor in expected_state.items():
            gap = (state[name] - tensor).abs().max().item()
            assert gap <= TOLERANCE, f"{name} after {layout}"
