"""Data parallelism: batch statistics, state of a rank, and efficiency."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common.models import networks
from common.ranks.rendezvous import World
from common.techniques.data_parallel.ddp import POWERSGD_TENSORS, ReplicaState, register_comm_hook
from tests.harness.commands.processes import Settings, run_experiment
from tests.harness.pitfalls.outcomes import collect_outcomes


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    return collect_outcomes("ddp_pitfalls", "compare_batchnorm_statistics", "describe_shards")


def test_each_rank_keeps_its_own_batch_statistics(outcomes: dict[str, Any]) -> None:
    assert outcomes["compare_batchnorm_statistics"] == [True, True]


def test_hybrid_sharding_divides_a_layer_and_may_keep_it_gathered(outcomes: dict[str, Any]) -> None:
    """Four ranks hold two replicas. Each rank holds half of the 784 x 128 weights of the first layer."""
    whole = 784 * 128
    resharded = [whole // 2, whole // 2]
    kept_after_forward = [whole // 2, whole]
    assert outcomes["describe_shards"] == [[resharded, kept_after_forward]] * 4


@pytest.mark.slow
def test_fsdp_shows_the_state_of_a_rank_and_that_of_ddp(tmp_path: Path, digits: Settings) -> None:
    settings = ("strategy=fsdp", "optim.name=adam", "batch=16", "steps=1", "log.progress=bar")
    process = run_experiment("ddp_multinode", *digits, *settings, runs=tmp_path)
    assert "1/1" in process.stdout
    assert "samples/s" not in process.stdout, "the speed is unknown after one step"

    model_bytes = 4 * sum(parameter.numel() for parameter in networks.ConvNet((28, 28), 10).parameters())
    full_bytes = process.result["unsharded_state_bytes"]
    assert full_bytes == pytest.approx(4 * model_bytes, rel=1e-4)  # Adam stores two numbers per parameter, and a step
    for kind, copies in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
        bytes_of_ranks = process.result["state_bytes"][kind]
        assert sum(bytes_of_ranks) == pytest.approx(copies * model_bytes, rel=1e-4), kind
        assert max(bytes_of_ranks) == pytest.approx(copies * model_bytes / 2, rel=0.01), kind

    half = f"{full_bytes / 2e6:.1f} MB"
    kinds = "parameters, gradients and optimizer state"
    needed = f"without sharding, each rank would need {full_bytes / 1e6:.1f} MB"
    message = f"rank 0: {half}  rank 1: {half}  of {kinds}; {needed}"
    assert message in process.stdout, process.stdout
    assert "of the whole process, libraries included" in process.stdout


@pytest.mark.parametrize("name", ["ddp_multinode", "resnet_dataparallel"])
def test_zero1_divides_the_optimizer_state_only(name: str, tmp_path: Path, digits: Settings) -> None:
    settings = ("zero1=true", "model=mlp", "optim.name=adam", "batch=16", "steps=1", "compare=false")
    process = run_experiment(name, *digits, *settings, runs=tmp_path)
    sizes = [parameter.numel() for parameter in networks.SimpleNN().parameters()]
    model_bytes = 4 * sum(sizes)
    state_bytes = process.result["state_bytes"]
    assert state_bytes["parameters"] == state_bytes["gradients"] == [model_bytes, model_bytes]
    # Adam stores two numbers per value of a parameter, and the number of steps. The largest matrix is not divided.
    assert state_bytes["optimizer"] == [8 * max(sizes) + 4, 8 * (sum(sizes) - max(sizes)) + 4 * (len(sizes) - 1)]
    assert process.result["unsharded_state_bytes"] == 4 * model_bytes + 4 * len(sizes)
    assert f"without sharding, each rank would need {4 * model_bytes / 1e6:.1f} MB" in process.stdout


@pytest.mark.slow
def test_compare_reports_the_efficiency(tmp_path: Path, digits: Settings) -> None:
    process = run_experiment("ddp_multinode", *digits, "batch=16", "compare=true", runs=tmp_path)
    assert 0 < process.result["efficiency"] < 4
    assert 0 < process.result["communication_exposed"] <= 1
    assert len(process.result["ranks"]) == 2
    assert "efficiency" in process.stdout
    assert "without sharding" not in process.stdout


@pytest.mark.parametrize("rank, loads", [(2, True), (3, False)])
def test_factors_of_another_matrix_rank_are_not_loaded(world: World, rank: int, loads: bool) -> None:
    """Their sizes do not fit. The errors of earlier steps are loaded in both cases."""
    saved = make_powersgd_model(2)
    for name in POWERSGD_TENSORS:
        getattr(saved.powersgd, name)[0] = torch.ones(4)
    resumed = make_powersgd_model(rank)
    resumed.load_state_dict(saved.state_dict())
    assert resumed.powersgd is not None
    assert [bool(getattr(resumed.powersgd, name)) for name in POWERSGD_TENSORS] == [True, loads, loads]


def make_powersgd_model(rank: int) -> ReplicaState:
    """Return the state of a model whose gradients are compressed by PowerSGD with matrices of this rank."""
    model = DistributedDataParallel(nn.Linear(2, 2))
    register_comm_hook(model, "powersgd", rank)
    return ReplicaState(model)
