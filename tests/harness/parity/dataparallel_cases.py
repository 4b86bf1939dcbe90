"""Train narrow ResNets by the strategies of resnet_dataparallel: many cases in one launch, or complete runs.

python -m tests.harness.parity.dataparallel_cases OUT_FILE CACHE RANKS key=value,key=value ...
    one argument for each case
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.config import config
from common.data.prepare import PreparedDataset
from common.models.networks import ResNet
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.training.run import Run
from configs.resnet_dataparallel import Config
from experiments import resnet_dataparallel
from tests.harness.commands import processes
from tests.harness.commands.processes import FinishedRun
from tests.harness.parity.cases import save_cases, train_script

CASE = {
    "model": "resnet18",
    "data.name": "generated",
    "data.samples": "49",  # six batches of 8, and one sample, so that the second rank has none
    "data.image_size": "16",
    "dtype": "float64",
    "batch": "8",
    "eval_batch": "5",
    "optim.warmup": "2",
    "epochs": "2",
    "steps": "10",
    "seed": "7",
    "compare": "false",
    "launch.threads": "1",
}

RUN_SETTINGS = (
    *("data.name=generated", "data.samples=49", "data.image_size=16", "batch=8", "epochs=2", "eval_batch=5"),
    *("dtype=float64", "optim.warmup=2", "launch.threads=1", "checkpoint.every_seconds=0"),
)
"""Settings of complete runs on the same images."""


def settings(text: str) -> tuple[Config, str]:
    """Return the config of a case. Only the strategy ddp accepts the number of ranks."""
    values_by_key = CASE | dict(argument.split("=") for argument in text.split(","))
    if values_by_key.get("strategy", "ddp") != "ddp":
        del values_by_key["processes_per_node"]
    return config.build_config(Config, [values_by_key]), ""


def train(cfg: Config, _: str, world: World, prepared: PreparedDataset, folder: RunFolder) -> dict[str, Any]:
    """Train one case on this rank; return its losses, full state and scores on rank 0."""

    def build(cfg: Config, run: Run) -> nn.Module:
        return ResNet("resnet18", run.sample_shape, run.classes, width=8).to(run.device, run.dtype)

    run = Run(cfg, folder, Ranks(world), prepared)
    outcome = train_script(resnet_dataparallel, run, (resnet_dataparallel, "build_model", build))
    return outcome if world.is_main else {}


def train_run(cache: Path, runs: Path, steps: int, *settings: str) -> tuple[FinishedRun, dict[str, Any]]:
    """Train a complete run; return it with its losses, scores, and the parameters and buffers of its checkpoint."""
    length = (f"steps={steps}", f"checkpoint.every_steps={steps}")
    arguments = (*RUN_SETTINGS, f"data.cache={cache}", *length, *settings)
    process = processes.run_experiment("resnet_dataparallel", *arguments, runs=runs, timeout=280)
    assert process.returncode == 0, process.stderr + process.stdout
    attempt_folder = process.folder.list_attempts()[0].attempt_folder
    checkpoint = torch.load(attempt_folder / f"checkpoints/step-{steps:08d}/rank-0.pt", weights_only=True)
    scores = process.folder.result["scores"]
    return process, {"losses": process.losses, "state": checkpoint["model"], "scores": scores}


if __name__ == "__main__":
    sys.exit(save_cases(settings, train, *sys.argv[1:]))
