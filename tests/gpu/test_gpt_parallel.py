"""Layouts of a GPT with NCCL equal a single process, and their memory and messages equal the formulas."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.system.exit_status import EXIT_REFUSED
from tests.harness.commands.processes import FinishedRun, Settings
from tests.harness.environment.shared_results import run_experiment_once
from tests.harness.gpu.gpu_runs import DEVICE, FLOAT64_TOLERANCE, compare_losses, train_on_gpu
from tests.harness.settings_text import split_cases, split_settings

NAME = "gpt_parallel"
LAYOUTS = split_cases("""
    replicas=1
    tensor=2
    tensor=2 sequence=true
    fsdp=2
    fsdp=2 reshard=false
    replicas=2
    replicas=2 fsdp=2
    fsdp=2 tensor=2 sequence=true
""")
BF16_LAYOUTS = [("replicas=1",), ("tensor=2",), ("fsdp=2",)]
SIZES = split_settings("width=16 layers=2 heads=2 batch=24 steps=6 data.context=16 data.test_limit=50")
CATEGORIES = ("parameters", "peak_parameters", "gradients", "optimizer", "sent")
FORMULA_TOLERANCE = 1e-3
"""Largest relative difference of a size from its formula, which omits messages of a few bytes."""


@pytest.fixture
def network(cache: Path) -> Settings:
    """Settings of a small GPT."""
    data = ("data.name=text", f"data.cache={cache}")
    quick = ("optim.warmup=0", "evaluate_every=0", "log.progress=none", "launch.threads=1")
    return (*data, *SIZES, *quick)


def train_reference(settings: Settings, factory: pytest.TempPathFactory) -> FinishedRun:
    """Return the run of one rank in float64 on the CPU."""
    return run_experiment_once(factory, "cpu-gpt", NAME, *settings, "replicas=1", "launch.device=cpu")


@pytest.mark.parametrize("layout", LAYOUTS, ids=",".join)
def test_a_layout_equals_a_single_process(
    layout: Settings, network: Settings, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = (*network, "dtype=float64", "dropout=0.2", "masked=0.3", "accumulate=2")
    reference = train_reference(settings, tmp_path_factory)
    run = train_on_gpu(NAME, *settings, *layout, runs=tmp_path)
    assert compare_losses(run, reference) < FLOAT64_TOLERANCE
    assert run.result["sample"].startswith("def ")


@pytest.mark.parametrize("layout", LAYOUTS, ids=",".join)
def test_memory_and_messages_equal_the_formulas(layout: Settings, network: Settings, tmp_path: Path) -> None:
    run = train_on_gpu(NAME, *network, *layout, runs=tmp_path)
    differing = {}
    for name in CATEGORIES:
        measured = run.result[f"{name}_bytes"]
        predicted = run.result[f"predicted_{name}_bytes"]
        if abs(measured - predicted) > FORMULA_TOLERANCE * predicted:
            differing[name] = (measured, predicted)
    assert not differing
    assert run.result["activations_bytes"] > 0


@pytest.mark.parametrize("layout", BF16_LAYOUTS, ids=",".join)
def test_bf16_changes_little(layout: Settings, network: Settings, tmp_path: Path) -> None:
    single = train_on_gpu(NAME, *network, "replicas=1", runs=tmp_path / "single")
    run = train_on_gpu(NAME, *network, *layout, "precision=bf16", runs=tmp_path / "bf16")
    assert compare_losses(run, single) < 0.03
    assert 0 < run.result["model_flops_utilization"] < 1


def test_context_parallelism_is_refused(network: Settings, tmp_path: Path) -> None:
    if DEVICE == "cpu":
        pytest.skip("context parallelism runs on CPUs")
    run = train_on_gpu(NAME, *network, "context=2", runs=tmp_path, status=EXIT_REFUSED)
    assert "context runs on CPUs only" in run.stderr
