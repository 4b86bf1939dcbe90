"""Train narrow ResNets by the strategies of resnet_dataparallel, many cases of one world size in one launch.

python -m tests.harness.dataparallel_parity OUT_FILE CACHE PROCESSES key=value,key=value ...     one argument a case
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from common import config, data, epochs, hooks, optim, scaling
from common.folder import Folder
from common.launch import World
from common.models import ResNet
from common.prepare import Prepared
from common.run import Run
from common.training import Training
from configs.resnet_dataparallel import Config
from experiments import resnet_dataparallel
from tests.harness.ddp_parity import in_processes

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


def settings(text: str) -> tuple[Config, str]:
    """The settings of a case; only ddp takes the number of processes."""
    chosen = CASE | dict(word.split("=") for word in text.split(","))
    if chosen.get("strategy", "ddp") != "ddp":
        del chosen["processes_per_node"]
    return config.resolve(Config, [chosen]), ""


def train(cfg: Config, _: str, world: World, prepared: Prepared, folder: Folder) -> dict[str, Any]:
    """One case on this process; on rank 0 its losses, full state and scores."""
    torch.manual_seed(1234)
    train_set, test_set = data.load(prepared, cfg.data)
    inner = ResNet("resnet18", train_set.shape, train_set.classes, width=8).to(world.device, getattr(torch, cfg.dtype))
    model = resnet_dataparallel.wrap(cfg, inner, world)
    optimizer = optim.make(model.parameters(), cfg.optim)
    loader = data.Loader.of(train_set, cfg, world.device, share=(world.rank, world.size), ragged=True)
    run, times = Run(cfg, folder, world, prepared), scaling.StepTimes(model, world.device)
    run.averaged, run.total = True, epochs.total_steps(cfg, loader)
    run.training = Training([hooks.inner(model)], optimizer, loader, world, replicated=True)
    step = 0
    while step < run.total:
        step = resnet_dataparallel.train_epoch(cfg, model, optimizer, loader, world, run, times, step)
        scores = resnet_dataparallel.evaluate(cfg, model, test_set, world)
    run.flush()
    if not world.is_main:
        return {}
    losses = [row["loss"] for row in folder.metrics() if "loss" in row]
    return {"losses": losses, "state": hooks.inner(model).state_dict(), "scores": scores}


if __name__ == "__main__":
    sys.exit(in_processes(settings, train, *sys.argv[1:]))
