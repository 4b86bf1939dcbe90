"""Every experiment trains on a GPU like on a CPU, with one rank, and with several ranks that use NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.commands.processes import FinishedRun, Settings
from tests.harness.environment.shared_results import run_experiment_once
from tests.harness.experiments.registry import Entry
from tests.harness.gpu.gpu_runs import (
    DEVICE,
    FLOAT64_TOLERANCE,
    GPU_ENTRIES,
    GPU_TRAINING_ENTRIES,
    compare_losses,
    train_on_gpu,
)


def get_name(entry: Entry) -> str:
    return entry.name


@pytest.mark.parametrize("entry", GPU_ENTRIES, ids=get_name)
def test_the_smallest_run_succeeds(entry: Entry, small: Settings, tmp_path: Path) -> None:
    run = train_on_gpu(entry.name, *small, *entry.smallest_settings, "steps=20", runs=tmp_path)
    result = run.result
    missing = [key for key in entry.result_keys if key not in result]
    assert not missing
    assert f"device {DEVICE}" in run.stdout
    if entry.trains_model:
        assert all(value > 0 for value in result["memory"].values())
        assert (run.folder.path / "model.safetensors").exists()


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("entry", GPU_TRAINING_ENTRIES, ids=get_name)
def test_ranks_on_gpus_equal_a_rank_on_a_cpu(
    entry: Entry, ranks: int, exact: Settings, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    reference = train_reference(entry, exact, tmp_path_factory)
    run = train_on_gpu(entry.name, *exact, *entry.make_rank_settings(ranks), runs=tmp_path)
    assert compare_losses(run, reference) < FLOAT64_TOLERANCE


def train_reference(entry: Entry, exact: Settings, factory: pytest.TempPathFactory) -> FinishedRun:
    """Return the run of one rank on the CPU, which all tests share."""
    settings = (*exact, *entry.make_rank_settings(1), "launch.device=cpu")
    return run_experiment_once(factory, f"cpu-{entry.name}", entry.name, *settings)
