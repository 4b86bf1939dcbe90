"""Data parallelism on GPUs: features of DDP and FSDP2 with NCCL, GPUs and CPUs together, and nn.DataParallel."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.commands.processes import FinishedRun, Settings, run_experiment
from tests.harness.environment.shared_results import run_experiment_once
from tests.harness.gpu.gpu_runs import (
    DEVICE,
    FLOAT64_TOLERANCE,
    check_logs,
    compare_losses,
    train_on_gpu,
    train_without_sharing,
)
from tests.harness.settings_text import split_cases, split_settings

TWO_RANKS = ("processes_per_node=2",)
EXACT_CASES = """
    strategy=fsdp clip=1 optim.name=adam
    shards=[3,1] dropout=0.3
    shards=[0,1] strategy=fsdp
    shards=auto
    static_graph=true data.workers=2
    find_unused_parameters=true optim.name=lamb log.gradient_norm=true
    strategy=fsdp optim.name=lars
"""
MIXED_CASES = """
    shards=equal
    shards=[3,1] clip=1
    shards=auto
"""
ONE_PROCESS_CASES = """
    strategy=single
    strategy=data_parallel
    strategy=data_parallel functional=true
"""
SMALL_RESNET = split_settings("model=resnet18 batch=16 steps=4 data.train_limit=64 data.test_limit=20 eval_batch=10")
MEASURED = split_settings("compare=true steps=26 epochs=2 log.gradient_norm=true profile=2")


def train_reference(settings: Settings, factory: pytest.TempPathFactory) -> FinishedRun:
    """Return a run of ddp_multinode on one rank on the CPU."""
    settings = (*settings, "processes_per_node=1", "launch.device=cpu")
    file_name = make_file_name(settings)
    return run_experiment_once(factory, file_name, "ddp_multinode", *settings)


def make_file_name(settings: Settings) -> str:
    """Return a name for settings that is short enough for a file."""
    names = [setting.rpartition("/")[2] for setting in settings]
    return "cpu-" + "-".join(names)[-180:]


@pytest.mark.parametrize("case", split_cases(EXACT_CASES), ids=",".join)
def test_two_ranks_with_nccl_equal_one_rank(
    case: Settings, exact: Settings, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = (*exact, "model=mlp")
    shared_settings = [setting for setting in case if setting.startswith(("clip=", "optim.", "dropout="))]
    reference = train_reference((*settings, *shared_settings), tmp_path_factory)
    run = train_on_gpu("ddp_multinode", *settings, *TWO_RANKS, *case, runs=tmp_path)
    assert compare_losses(run, reference) < FLOAT64_TOLERANCE


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_batchnorm_is_synchronized(
    strategy: str, exact: Settings, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    network = (*exact, *SMALL_RESNET)
    reference = train_reference(network, tmp_path_factory)
    settings = (*network, *TWO_RANKS, f"strategy={strategy}", "sync_batchnorm=true")
    run = train_on_gpu("ddp_multinode", *settings, runs=tmp_path)
    assert compare_losses(run, reference) < FLOAT64_TOLERANCE


@pytest.mark.parametrize(("communication", "tolerance"), [("fp16", 0.01), ("bf16", 0.03), ("powersgd", 0.3)])
def test_compressed_gradients_change_little(
    communication: str, tolerance: float, small: Settings, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = (*small, "model=mlp", "steps=13", "optim.lr=0.01")
    reference = train_reference(settings, tmp_path_factory)
    run = train_on_gpu("ddp_multinode", *settings, *TWO_RANKS, f"communication={communication}", runs=tmp_path)
    assert compare_losses(run, reference) < tolerance


def test_the_report_measures_communication_and_efficiency(small: Settings, tmp_path: Path) -> None:
    settings = (*small, *TWO_RANKS, *MEASURED)
    run = train_on_gpu("ddp_multinode", *settings, runs=tmp_path)
    assert run.result["communication_seconds"] > 0
    assert run.result["efficiency"] > 0
    assert 0 <= run.result["communication_exposed"] <= 1
    assert list(run.folder.path.rglob("trace-1.json"))


@pytest.mark.parametrize("case", split_cases(MIXED_CASES), ids=",".join)
def test_a_gpu_and_a_cpu_equal_one_rank(
    case: Settings, exact: Settings, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    network = (*exact, "model=mlp")
    clip = [setting for setting in case if setting.startswith("clip=")]
    reference = train_reference((*network, *clip), tmp_path_factory)
    settings = (*network, *TWO_RANKS, "launch.mixed=true", *case)
    run = train_without_sharing("ddp_multinode", *settings, runs=tmp_path)
    assert compare_losses(run, reference) < FLOAT64_TOLERANCE
    if DEVICE == "cuda":
        gpu, cpu = run.result["rank_devices"]
        assert gpu != "cpu"
        assert cpu == "cpu"
    check_logs(run.folder)


def test_mixed_precision_on_a_gpu_and_a_cpu(small: Settings, tmp_path: Path) -> None:
    settings = (*small, *TWO_RANKS, "launch.mixed=true", "precision=bf16", "accumulate=2")
    run = train_without_sharing("amp_accum", *settings, runs=tmp_path)
    assert run.losses[-1] < run.losses[0]
    check_logs(run.folder)


def test_synchronized_batchnorm_on_a_gpu_and_a_cpu(
    exact: Settings, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    network = (*exact, *SMALL_RESNET)
    reference = train_reference(network, tmp_path_factory)
    settings = (*network, *TWO_RANKS, "launch.mixed=true", "sync_batchnorm=true", "shards=[3,1]")
    run = train_without_sharing("ddp_multinode", *settings, runs=tmp_path)
    assert compare_losses(run, reference) < FLOAT64_TOLERANCE


@pytest.mark.parametrize("case", split_cases(ONE_PROCESS_CASES), ids=",".join)
def test_strategies_of_one_process_are_equal(case: Settings, exact: Settings, tmp_path: Path) -> None:
    settings = (*exact, "model=convnet", "compare=false", "batch=23")  # the last batch of the epoch is partial
    settings = (*settings, "steps=14")
    on_cpu = (*settings, "strategy=single", "launch.device=cpu")
    reference = run_experiment("resnet_dataparallel", *on_cpu, runs=tmp_path / "cpu")
    run = train_on_gpu("resnet_dataparallel", *settings, *case, runs=tmp_path / "gpu")
    assert compare_losses(run, reference) < FLOAT64_TOLERANCE


def test_strategies_are_compared(small: Settings, tmp_path: Path) -> None:
    settings = (*small, "model=convnet", "compare=true", "sync_batchnorm=false", *TWO_RANKS)
    run = train_on_gpu("resnet_dataparallel", *settings, runs=tmp_path)
    assert set(run.result["compare"]) >= {"ddp", "single, 1 thread"}
