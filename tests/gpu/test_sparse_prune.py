"""Pruning on a GPU: savings of sparse formats, and the same masks as on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.commands.processes import Settings, run_experiment
from tests.harness.gpu.gpu_runs import DEVICE, train_on_gpu
from tests.harness.settings_text import split_cases

NAME = "sparse_prune"
CASES = split_cases("""
    schedule=rigl sparsity=0.9
    model=lenet5 scope=structured criterion=taylor sparsity=0.5
    scope=n:m pattern=2:4 sparsity=0.5 model=mlp
    schedule=none l1=0.01
""")


@pytest.mark.parametrize("case", CASES, ids=",".join)
def test_savings_are_measured(case: Settings, small: Settings, tmp_path: Path) -> None:
    run = train_on_gpu(NAME, *small, "every=3", *case, "int8=true", "export=true", runs=tmp_path)
    assert "export_problem" not in run.result, run.result["export_problem"]
    assert run.result["export_difference"] < 1e-3
    if DEVICE == "cuda":
        assert run.result["two_of_four_seconds"] > 0
        assert " times as fast" in run.stdout


def test_masks_are_the_same_as_on_a_cpu(exact: Settings, tmp_path: Path) -> None:
    settings = (*exact, "every=3", "criterion=taylor", "export=false", "int8=false")
    on_cpu = run_experiment(NAME, *settings, "launch.device=cpu", runs=tmp_path / "cpu")
    on_gpus = train_on_gpu(NAME, *settings, "processes_per_node=2", runs=tmp_path / "gpu")
    assert on_gpus.result["masks"] == on_cpu.result["masks"]
