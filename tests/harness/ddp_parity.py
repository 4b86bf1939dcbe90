"""Train many data-parallel cases of one world size in one launch, for the parity tests to compare.

    python -m tests.harness.ddp_parity OUT_FILE CACHE PROCESSES key=value,key=value ...      one argument a case

A case may begin with one of MISTAKES: it then makes that mistake.
"""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.core import config
from common.data import loader as data
from common.data.prepare import Prepared
from common.distributed.rendezvous import World
from common.measure import step_timing
from common.models import networks
from common.runs.folder import Folder
from common.training import optimizers
from common.training.run import Run
from configs.ddp_multinode import Config
from experiments import ddp_multinode
from tests.harness import reference
from tests.harness.cases import prepare_for, save_cases
from tests.harness.reference import differences

CONVNET = {
    "data.name": "generated",
    "data.samples": "505",
    "data.image_size": "12",
    "data.train_limit": "100",  # 4 batches an epoch, and 4 samples left out
    "data.test_limit": "101",  # no multiple of 2 or 4
    "dtype": "float64",
    "launch.threads": "1",
    "batch": "24",
    "eval_batch": "16",
    "optim.lr": "0.15",  # SGD: Adam would not notice a wrong factor
    "optim.base_batch": "24",
    "optim.warmup": "5",
    "optim.decay": "cosine",
    "clip": "2",
    "bucket_mb": "0.25",
    "epochs": "8",
    "steps": "30",
    "seed": "7",
}
RESNET = CONVNET | {
    "model": "resnet18",
    "data.train_limit": "20",
    "data.test_limit": "9",
    "batch": "4",
    "optim.lr": "0.05",
    "optim.base_batch": "4",
    "eval_batch": "4",
    "epochs": "6",
}
WIDTH = 8
MISTAKES = ("sums_losses", "no_communication", "same_share", "slow_rank")


def settings(text: str) -> tuple[Config, str]:
    """The settings of a case, and the mistake it makes, if any."""
    words = text.split(",")
    mistake = words.pop(0) if "=" not in words[0] else ""
    assert not mistake or mistake in MISTAKES
    chosen = dict(word.split("=") for word in words)
    base = RESNET if chosen.get("model") == "resnet18" else CONVNET
    return config.build_config(Config, [base | chosen]), mistake


def unsplit(cfg: Config) -> nn.Module:
    """The model in float64; a ResNet has few channels. At 12 pixels its last layers see 2x2: BatchNorm needs some
    values to be well conditioned."""
    shape = (3, cfg.data.image_size, cfg.data.image_size)
    if cfg.model == "resnet18":
        return networks.ResNet("resnet18", shape, 10, width=WIDTH, large=False).double()
    return networks.ConvNet(shape, 10).double()


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The full state of a wrapped model. All processes call it."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    state = inner.state_dict()
    return {name: v.full_tensor() if hasattr(v, "full_tensor") else v.clone() for name, v in state.items()}


def train(cfg: Config, mistake: str, world: World, prepared: Prepared, folder: Folder) -> dict[str, Any]:
    """One case on this process; on rank 0 its losses, full state and scores."""
    torch.manual_seed(1234)
    train_set, test_set = data.load_train_test(prepared, cfg.data)
    model = ddp_multinode.wrap(cfg, unsplit(cfg), world)
    optimizer = optimizers.make(model.parameters(), cfg.optim)
    share = (0 if mistake == "same_share" else world.rank, world.size)
    loader = data.Loader(train_set, cfg.batch, cfg.seed, world.device, torch.float64, block=3, shard=share)
    run = Run(cfg, folder, world, prepared)
    run.averaged, run.total = True, cfg.steps
    if mistake == "sums_losses":
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * world.size)
    if mistake == "no_communication":
        assert isinstance(model, DistributedDataParallel)
        model.require_backward_grad_sync = False
    if mistake == "slow_rank" and world.rank == 1:
        model.register_forward_pre_hook(lambda *_: time.sleep(0.1))
    times = step_timing.StepTimes(model, world.device)
    step = 0
    while step < cfg.steps:
        step = ddp_multinode.train_epoch(cfg, model, optimizer, loader, run, times, step, cfg.steps)
        before = whole(model)
        scores = ddp_multinode.evaluate(cfg, model, test_set, world)
    run.flush()
    ranks = world.gather(times.summary())
    state = whole(model)
    equal = torch.tensor([float(sum(v.double().sum() for v in state.values()))], dtype=torch.float64)
    sums = [torch.zeros_like(equal) for _ in range(world.size)]
    dist.all_gather(sums, equal)
    if not world.is_main:
        return {}
    losses = [row["loss"] for row in folder.metrics() if "loss" in row]
    return {"losses": losses, "state": state, "scores": scores, "sums": [float(s) for s in sums], "before": before} | {
        "straggler": step_timing.straggler(ranks) if mistake == "slow_rank" else None
    }


@functools.cache
def expected(cache: Path, case: str, shares: int = 1) -> dict[str, Any]:
    """One process that trains the unsplit model by the bare loop; shares have BatchNorm buffers of their own."""
    cfg, _ = settings(case)
    prepared = prepare_for(cfg, str(cache))
    torch.manual_seed(1234)
    return reference.trained(cfg, unsplit(cfg), prepared, shares=shares)


def wrong(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What differs from the reference, or between the processes."""
    counts = ("test_accuracy", "test_samples")
    unequal = [name for name in counts if found["scores"][name] != expected["scores"][name]]
    apart = ["processes hold different models"] if len(set(found["sums"])) > 1 else []
    return differences(found, expected) + unequal + apart


if __name__ == "__main__":
    sys.exit(save_cases(settings, train, *sys.argv[1:]))
