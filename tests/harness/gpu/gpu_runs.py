"""Train experiments on GPUs, and compare the runs with runs on CPUs."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from common.config import config, config_keys
from common.runs.folder import RunFolder, read_json
from tests.harness.commands import execution
from tests.harness.commands.processes import FinishedRun, make_environment, make_run_command, run_experiment
from tests.harness.experiments.registry import ENTRIES, Entry
from tests.harness.gpu.visible_gpus import get_hidden_gpus
from tests.harness.runs.resuming import load_final_state, read_compared_rows

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")
"""Device of the ranks. GPU_TESTS_DEVICE=cpu checks the tests themselves on a machine without a GPU."""
FIRST_GPU = "cpu" if DEVICE == "cpu" else "cuda:0"
BACKEND = "gloo" if DEVICE == "cpu" else "nccl"
SHARED_GPU = ("-m", "tests.harness.gpu.shared_gpu")
FLOAT64_TOLERANCE = 1e-9
"""Largest relative difference of losses in float64, which is caused by a different order of sums."""
SUSPICIOUS_LINE = re.compile(r"Traceback|NCCL WARN|UserWarning: barrier")
RUN_SECONDS = 100.0


def runs_on_gpus(entry: Entry) -> bool:
    """Return whether an experiment accepts launch.device=cuda. Others set launch.device=cpu in their YAML file."""
    cfg = config.load_config(config.import_schema(entry.name), [], {})
    return cfg.launch.device != "cpu"


GPU_ENTRIES = [entry for entry in ENTRIES if runs_on_gpus(entry)]
GPU_TRAINING_ENTRIES = [entry for entry in GPU_ENTRIES if entry.trains_model]


def make_gpu_command(name: str, *settings: str, runs: Path) -> list[str]:
    """Return the command line of a run whose ranks share the GPUs."""
    defaults = [f"launch.device={DEVICE}"]
    schema = config.import_schema(name)
    if "devices" in config_keys.list_keys(schema):
        defaults.append("devices=[]")  # one rank per stage, as on a machine without a GPU
    python, *script = make_run_command(name, *defaults, *settings, runs=runs)
    return [python, *SHARED_GPU, *script]


def train_on_gpu(name: str, *settings: str, runs: Path, status: int | None = 0, **env: str) -> FinishedRun:
    """Train an experiment with ranks that share the GPUs, and check the exit status, the device and the logs."""
    argv = make_gpu_command(name, *settings, runs=runs)
    environment = make_gpu_environment(**env)
    process = execution.execute_command(argv, env=environment, timeout=RUN_SECONDS, status=status)
    run = FinishedRun(process.returncode, process.stdout, process.stderr, runs)
    if status == 0:
        check_world(run.folder)
        check_logs(run.folder)
    return run


def train_without_sharing(name: str, *settings: str, runs: Path, status: int | None = 0) -> FinishedRun:
    """Train an experiment as a user does: each rank on a GPU needs one of its own."""
    gpus = get_hidden_gpus()
    return run_experiment(name, *settings, runs=runs, timeout=RUN_SECONDS, status=status, CUDA_VISIBLE_DEVICES=gpus)


def make_gpu_environment(**env: str) -> dict[str, str]:
    """Return the environment of a command that sees the GPUs of this machine."""
    return make_environment(CUDA_VISIBLE_DEVICES=get_hidden_gpus(), **env)


def check_world(folder: RunFolder) -> None:
    """Check that the ranks of the newest attempt used the tested device and its backend."""
    newest = folder.list_attempts()[-1]
    world = read_json(newest.attempt_folder / "world.json")
    assert world["backend"] == BACKEND
    is_cpu = world["device"] == "cpu"
    assert is_cpu == (DEVICE == "cpu"), world


def check_logs(folder: RunFolder) -> None:
    """Check that no rank has logged an error or a warning of NCCL."""
    for attempt in folder.list_attempts():
        logs = attempt.log_file(0).parent
        for file in sorted(logs.iterdir()):
            text = file.read_text()
            assert not SUSPICIOUS_LINE.search(text), text


def resume_on_gpu(entry: Entry, folder: RunFolder, *arguments: str) -> str:
    """Resume a run with ranks that share the GPUs, and return its output."""
    script = f"experiments/{entry.name}.py"
    argv = [sys.executable, *SHARED_GPU, script, "--resume", str(folder.path), *arguments]
    environment = make_gpu_environment()
    process = execution.execute_command(argv, env=environment, timeout=RUN_SECONDS, status=0)
    check_logs(folder)
    return process.stdout


def compute_relative_difference(value: float, expected: float) -> float:
    """Return the difference of two numbers, divided by the larger of 1 and the expected magnitude; infinity for NaN."""
    scale = max(1.0, abs(expected))
    difference = abs(value - expected) / scale
    return math.inf if math.isnan(difference) else difference


def compare_losses(run: FinishedRun, reference: FinishedRun) -> float:
    """Return the largest relative difference of the losses of all steps and of the test losses of two runs."""
    assert len(run.losses) == len(reference.losses) > 0
    pairs = list(zip(run.losses, reference.losses, strict=True))
    assert run.result["test_samples"] == reference.result["test_samples"]
    pairs.append((run.result["test_loss"], reference.result["test_loss"]))
    return max(compute_relative_difference(value, expected) for value, expected in pairs)


def compare_runs(folder: RunFolder, reference: RunFolder) -> float:
    """Return the largest relative difference of the rows and of the final states of two runs; 0 if they are equal."""
    largest = 0.0
    rows = read_compared_rows(folder)
    expected_rows = read_compared_rows(reference)
    assert len(rows) == len(expected_rows)
    for row, expected_row in zip(rows, expected_rows, strict=True):
        largest = max(largest, compare_numbers(row, expected_row))
    state = load_final_state(folder)
    expected_state = load_final_state(reference)
    assert state.keys() == expected_state.keys()
    for name, tensor in state.items():
        difference = compare_tensors(tensor.double(), expected_state[name].double())
        largest = max(largest, difference)
    return largest


def compare_tensors(tensor: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors, divided by the larger of 1 and the largest expected magnitude.

    The result is infinity if a difference is NaN.
    """
    if not expected.numel():
        return 0.0
    scale = expected.abs().max().clamp(min=1.0)
    difference = float((tensor - expected).abs().max() / scale)
    return math.inf if math.isnan(difference) else difference


def compare_numbers(row: Sequence[Any], expected_row: Sequence[Any]) -> float:
    """Return the largest relative difference of the numbers of two rows, in which None has the same positions."""
    largest = 0.0
    for value, expected in zip(row, expected_row, strict=True):
        assert (value is None) == (expected is None)
        if value is not None:
            largest = max(largest, compute_relative_difference(value, expected))
    return largest
