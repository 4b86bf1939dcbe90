"""A resumed run on a GPU equals an uninterrupted run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from common.config import config
from tests.harness.commands.processes import Settings
from tests.harness.experiments.registry import Entry
from tests.harness.gpu.gpu_runs import (
    DEVICE,
    FIRST_GPU,
    FLOAT64_TOLERANCE,
    GPU_TRAINING_ENTRIES,
    compare_runs,
    resume_on_gpu,
    train_on_gpu,
)
from tests.harness.runs.resuming import copy_as_interrupted, resume_run

INTERRUPTED_AFTER = 6
CASES = []
for gpu_entry in GPU_TRAINING_ENTRIES:
    for number, variant in enumerate([gpu_entry.make_rank_settings(2), *gpu_entry.resume_variants]):
        CASES.append(pytest.param(gpu_entry, variant, id=f"{gpu_entry.name}-{number}"))


@pytest.mark.parametrize(("entry", "variant"), CASES)
def test_a_resumed_run_equals_an_uninterrupted_run(
    entry: Entry, variant: Settings, small: Settings, tmp_path: Path
) -> None:
    if DEVICE == "cuda" and "context=2" in variant:
        pytest.skip("context parallelism runs on CPUs only")
    settings = [setting.replace("cpu,cpu", f"{FIRST_GPU},{FIRST_GPU}") for setting in variant]
    tolerance = 0.0
    if {"precision=bf16", "precision=fp16"} & set(settings):
        settings.append("model=mlp")
    elif has_convolutions(entry, [*small, *settings]):  # cuDNN adds their gradients in a varying order
        settings.append("dtype=float64")
        tolerance = FLOAT64_TOLERANCE
    steps = ("steps=10", "checkpoint.every_steps=3")
    complete = train_on_gpu(entry.name, *small, *settings, *steps, runs=tmp_path / "complete").folder
    folder = copy_as_interrupted(complete, INTERRUPTED_AFTER, tmp_path)
    assert f"resumed from step {INTERRUPTED_AFTER}" in resume_on_gpu(entry, folder)
    assert compare_runs(folder, complete) <= tolerance


def has_convolutions(entry: Entry, settings: Sequence[str]) -> bool:
    """Return whether the network of a run has convolutions."""
    cfg: Any = config.load_config(config.import_schema(entry.name), list(settings), {})
    return cfg.model not in ("mlp", "lenet300", "gpt")


@pytest.mark.parametrize("entry", GPU_TRAINING_ENTRIES, ids=lambda entry: entry.name)
def test_a_run_moves_from_a_gpu_to_a_cpu(entry: Entry, exact: Settings, tmp_path: Path) -> None:
    settings = (*exact, *entry.make_rank_settings(1))
    complete = train_on_gpu(entry.name, *settings, runs=tmp_path / "complete").folder
    folder = copy_as_interrupted(complete, INTERRUPTED_AFTER, tmp_path)
    output = resume_run(entry, folder, "launch.device=cpu").stdout
    assert f"resumed from step {INTERRUPTED_AFTER}" in output
    assert compare_runs(folder, complete) < FLOAT64_TOLERANCE
