"""Pipelines on GPUs: every schedule with NCCL, several stages on one GPU, and a limit on the memory of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.system.exit_status import EXIT_REFUSED
from tests.harness.commands.processes import FinishedRun, Settings
from tests.harness.environment.shared_results import run_experiment_once
from tests.harness.gpu.gpu_runs import (
    DEVICE,
    FIRST_GPU,
    FLOAT64_TOLERANCE,
    check_logs,
    compare_losses,
    train_on_gpu,
    train_without_sharing,
)

NETWORK = ("depth=3", "microbatches=4", "clip=1")
TWO_STAGES: Settings = ("stages=2",)
TWO_STAGES_PER_RANK: Settings = ("stages=4", "stages_per_process=2")
CASES = [(schedule, TWO_STAGES) for schedule in ("naive", "gpipe", "1f1b", "zero_bubble")]
CASES += [(schedule, TWO_STAGES_PER_RANK) for schedule in ("gpipe", "interleaved_1f1b", "zbv", "dualpipev")]
RESNET = ("width=8", "batch=16", "split_size=8", "stages=2", "plot=false")


@pytest.fixture
def unsplit(exact: Settings, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The run of one rank on the CPU."""
    settings = (*exact, *NETWORK, "stages=1", "launch.device=cpu")
    return run_experiment_once(tmp_path_factory, "unsplit-mlp", "mnist_pipeline", *settings)


@pytest.mark.parametrize("engine", ["own", "torch"])
@pytest.mark.parametrize(("schedule", "stages"), CASES)
def test_a_schedule_with_nccl_equals_the_unsplit_model(
    schedule: str, stages: Settings, engine: str, exact: Settings, unsplit: FinishedRun, tmp_path: Path
) -> None:
    settings = (*exact, *NETWORK, *stages, f"schedule={schedule}", f"engine={engine}")
    run = train_on_gpu("mnist_pipeline", *settings, runs=tmp_path)
    assert compare_losses(run, unsplit) < FLOAT64_TOLERANCE
    assert all(0 <= share < 1 for share in run.result["idle_share"])


@pytest.mark.parametrize("mode", ["naive", "pipelined"])
def test_stages_of_one_process_equal_ranks(mode: str, exact: Settings, tmp_path: Path) -> None:
    settings = (*exact, *RESNET, f"mode={mode}")
    devices = f"devices=[{FIRST_GPU},{FIRST_GPU}]"
    in_one_process = train_on_gpu("resnet_modelparallel", *settings, devices, runs=tmp_path / "one")
    ranks = train_on_gpu("resnet_modelparallel", *settings, runs=tmp_path / "ranks")
    assert compare_losses(ranks, in_one_process) < FLOAT64_TOLERANCE
    assert in_one_process.result["training_bytes"] > 0


def test_visible_gpus_are_used_from_one_process(small: Settings, tmp_path: Path) -> None:
    run = train_without_sharing("resnet_modelparallel", *small, *RESNET, runs=tmp_path)
    if DEVICE == "cuda":
        output = " ".join(run.stdout.split())
        assert "cuda:0 in one process" in output
    check_logs(run.folder)


def test_replicas_of_a_pipeline_equal_one_pipeline(exact: Settings, tmp_path: Path) -> None:
    settings = (*exact, "model=toy", "data.name=vectors", "data.samples=320", *TWO_STAGES)
    settings = (*settings, "plot=false", "batch=16", "split_size=4")
    reference = train_on_gpu("resnet_modelparallel", *settings, runs=tmp_path / "one")
    run = train_on_gpu("resnet_modelparallel", *settings, "replicas=2", runs=tmp_path / "two")
    assert compare_losses(run, reference) < FLOAT64_TOLERANCE


def test_the_memory_of_a_gpu_can_be_limited(small: Settings, tmp_path: Path) -> None:
    settings = (*small, "width=64", "batch=64", "mode=single", "plot=false", "split_size=64")
    run = train_on_gpu("resnet_modelparallel", *settings, "memory_cap=100", runs=tmp_path, status=EXIT_REFUSED)
    assert "does not fit into 100 MB" in run.stderr
