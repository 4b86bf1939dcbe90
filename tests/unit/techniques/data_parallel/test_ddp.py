"""Data parallelism: batch statistics, state of a rank, and efficiency."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.models import networks
from tests.harness.commands.processes import Settings, run_experiment
from tests.harness.pitfalls.outcomes import collect_outcome


def test_each_rank_keeps_its_own_batch_statistics() -> None:
    assert collect_outcome("ddp_pitfalls", "compare_batchnorm_statistics") == [True, True]


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


def test_compare_reports_the_efficiency(tmp_path: Path, digits: Settings) -> None:
    process = run_experiment("ddp_multinode", *digits, "batch=16", "compare=true", runs=tmp_path)
    assert 0 < process.result["efficiency"] < 4
    assert 0 < process.result["communication_exposed"] <= 1
    assert len(process.result["ranks"]) == 2
    assert "efficiency" in process.stdout
    assert "without sharding" not in process.stdout
