"""Method of resnet_dataparallel with narrow ResNets, and complete runs of this experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.models.networks import ResNet
from common.training.run import Run
from configs.resnet_dataparallel import Config
from experiments import resnet_dataparallel
from tests.harness.commands import processes
from tests.harness.commands.processes import FinishedRun
from tests.harness.parity.method import COMMON_SETTINGS, Outcome, ParityMethod

SETTINGS = (
    "data.name=generated",
    "data.samples=49",  # six batches of 8, and one sample, so that the second rank has none
    "data.image_size=16",
    "batch=8",
    "eval_batch=5",
    "optim.warmup=2",
    "epochs=2",
)


def build_narrow_resnet(_: Any, cfg: Config, run: Run) -> nn.Module:
    model = ResNet("resnet18", run.sample_shape, run.outputs, width=8)
    return model.to(run.device, run.dtype)


DATA_PARALLEL = ParityMethod(
    name="dataparallel_cases:DATA_PARALLEL",
    schema=Config,
    train=resnet_dataparallel.main,
    settings=(*SETTINGS, "model=resnet18", "steps=10", "seed=7", "compare=false"),
    ranks_setting="",  # two ranks by default; strategies other than ddp do not accept a number of ranks
    replacements=[(resnet_dataparallel, "build_model", build_narrow_resnet)],
)


def train_run(cache: Path, runs: Path, steps: int, *settings: str) -> tuple[FinishedRun, Outcome]:
    """Train a complete run; return it with its losses, scores, and the parameters and buffers of its checkpoint."""
    length = (f"steps={steps}", f"checkpoint.every_steps={steps}")
    arguments = (*COMMON_SETTINGS, *SETTINGS, f"data.cache={cache}", *length, *settings)
    process = processes.run_experiment("resnet_dataparallel", *arguments, runs=runs, timeout=280)
    assert process.returncode == 0, process.stderr + process.stdout
    attempt_folder = process.folder.list_attempts()[0].attempt_folder
    checkpoint = torch.load(attempt_folder / f"checkpoints/step-{steps:08d}/rank-0.pt", weights_only=True)
    scores = process.folder.result["scores"]
    outcome = {"losses": process.losses, "state": checkpoint["model"], "scores": scores}
    return process, outcome
