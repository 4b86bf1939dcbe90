"""Mixed precision on a GPU: number formats, loss scaling, memory formats, and the compiler."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.harness.commands.processes import FinishedRun, Settings
from tests.harness.environment.shared_results import run_experiment_once
from tests.harness.gpu.gpu_runs import DEVICE, compare_losses, train_on_gpu

TOLERANCES = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2, "fp16": 1e-2}
STEP = ("model=convnet", "accumulate=2", "optim.lr=0.005")


@pytest.fixture
def on_cpu(small: Settings, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The run of one rank in float32 on the CPU."""
    settings = (*small, *STEP, "precision=fp32", "processes_per_node=1", "launch.device=cpu")
    return run_experiment_once(tmp_path_factory, "convnet-fp32", "amp_accum", *settings)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("precision", TOLERANCES)
def test_losses_are_close_to_float32(
    precision: str, ranks: int, small: Settings, on_cpu: FinishedRun, tmp_path: Path
) -> None:
    settings = (*small, *STEP, f"precision={precision}", f"processes_per_node={ranks}", "log.gradient_norm=true")
    run = train_on_gpu("amp_accum", *settings, runs=tmp_path)
    assert compare_losses(run, on_cpu) < TOLERANCES[precision]
    assert run.result["computed_in"] == (precision if DEVICE == "cuda" or precision != "tf32" else "fp32")
    assert run.result["training_bytes"] > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_with_overflow_are_skipped(ranks: int, small: Settings, tmp_path: Path) -> None:
    settings = (*small, *STEP, "precision=fp16", "init_scale=1e9", f"processes_per_node={ranks}", "clip=1")
    run = train_on_gpu("amp_accum", *settings, runs=tmp_path)
    assert run.result["steps_skipped"] > 0
    assert run.losses[-1] < run.losses[0]


@pytest.mark.parametrize("precision", TOLERANCES)
def test_channels_last_and_the_compiler_change_little(
    precision: str, small: Settings, on_cpu: FinishedRun, tmp_path: Path
) -> None:
    if not shutil.which("g++"):
        pytest.skip("no C++ compiler is installed")
    settings = (*small, *STEP, f"precision={precision}", "processes_per_node=1", "channels_last=true")
    run = train_on_gpu("amp_accum", *settings, "compile=true", runs=tmp_path)
    assert compare_losses(run, on_cpu) < TOLERANCES[precision]


def test_the_compiler_works_with_ddp(small: Settings, on_cpu: FinishedRun, tmp_path: Path) -> None:
    settings = (*small, *STEP, "precision=bf16", "processes_per_node=2", "compile=true")
    run = train_on_gpu("amp_accum", *settings, runs=tmp_path)
    assert compare_losses(run, on_cpu) < TOLERANCES["bf16"]
