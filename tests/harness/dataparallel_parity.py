"""Models trained by the strategies of resnet_dataparallel: narrow ResNets, many cases in one launch; and whole runs.

python -m tests.harness.dataparallel_parity OUT_FILE CACHE PROCESSES key=value,key=value ...     one argument a case
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
from tests.harness import processes
from tests.harness.cases import save_cases, train_script
from tests.harness.processes import Done

CASE = {
    "model": "resnet18",
    "data.name": "generated",
    "data.samples": "49",  # six batches of 8, and a last one that leaves the second process without a sample
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

# the same images in runs of the experiment itself, whose last step is saved
WHOLE = (
    *("data.name=generated", "data.samples=49", "data.image_size=16", "batch=8", "epochs=2", "eval_batch=5"),
    *("dtype=float64", "optim.warmup=2", "launch.threads=1", "checkpoint.every_seconds=0"),
)


def settings(text: str) -> tuple[Config, str]:
    """The settings of a case; only ddp takes the number of processes."""
    chosen = CASE | dict(word.split("=") for word in text.split(","))
    if chosen.get("strategy", "ddp") != "ddp":
        del chosen["processes_per_node"]
    return config.build_config(Config, [chosen]), ""


def train(cfg: Config, _: str, world: World, prepared: PreparedDataset, folder: RunFolder) -> dict[str, Any]:
    """One case on this rank; on rank 0 its losses, full state and scores."""

    def build(cfg: Config, run: Run) -> nn.Module:
        return ResNet("resnet18", run.sample_shape, run.classes, width=8).to(run.device, run.dtype)

    run = Run(cfg, folder, Ranks(world), prepared)
    found = train_script(resnet_dataparallel, run, (resnet_dataparallel, "build_model", build))
    return found if world.is_main else {}


def train_run(cache: Path, runs: Path, steps: int, *words: str) -> tuple[Done, dict[str, Any]]:
    """A run of so many steps, and its losses, saved parameters and buffers, and scores."""
    given = (*WHOLE, f"data.cache={cache}", f"steps={steps}", f"checkpoint.every_steps={steps}", *words)
    done = processes.run("resnet_dataparallel", *given, runs=runs, timeout=280)
    assert done.status == 0, done.err + done.out
    file = done.folder.list_attempts()[0].attempt_folder / "checkpoints" / f"step-{steps:08d}" / "rank-0.pt"
    state = torch.load(file, weights_only=True)["model"]
    scores = done.folder.result["scores"]
    return done, {"losses": done.losses, "state": state, "scores": scores}


if __name__ == "__main__":
    sys.exit(save_cases(settings, train, *sys.argv[1:]))
