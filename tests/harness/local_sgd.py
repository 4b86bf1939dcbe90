"""Train cases of local SGD, of DDP and of torch's PostLocalSGDOptimizer in one launch, for parity tests to compare.

    python -m tests.harness.local_sgd OUT_FILE CACHE PROCESSES key=value,key=value ...      one argument a case

A case may begin with `ddp`, for the same training by DDP, or with `torch`, for that by torch's own optimizer.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from common.api import Run, TrainState, build_optimizer, init_network, score_replicated
from common.core import config
from common.data.prepare import Prepared
from common.distributed.rendezvous import World
from common.runs.folder import Folder
from configs import ddp_multinode as ddp_settings
from configs.local_sgd import Config
from experiments import ddp_multinode, local_sgd
from tests.harness.cases import save_cases, train_script

BASE = {
    "data.name": "digits",
    "data.train_limit": "120",  # 5 batches an epoch
    "data.test_limit": "100",
    "dtype": "float64",
    "model": "mlp",
    "launch.threads": "1",
    "batch": "24",
    "optim.lr": "0.05",
    "optim.base_batch": "24",
    "optim.warmup": "5",
    "epochs": "8",
    "steps": "26",
    "checkpoint.every_seconds": "0",
}
SPECIAL = ("ddp", "torch")


def settings(text: str) -> tuple[Any, str]:
    """The settings of a case, and what trains it if not local_sgd."""
    words = text.split(",")
    special = words.pop(0) if words[0] in SPECIAL else ""
    chosen = BASE | dict(word.split("=") for word in words)
    return config.build_config(ddp_settings.Config if special == "ddp" else Config, [chosen]), special


def train_with_torch(cfg: Config, run: Run) -> None:
    """Post-local SGD as torch does it, from whose first step on its averager counts."""
    network = init_network(cfg, run.sample_shape, run.classes).to(run.dtype)
    model = DistributedDataParallel(network)
    state = post_localSGD_hook.PostLocalSGDState(None, None, cfg.start, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=cfg.every, warmup_steps=cfg.start + cfg.every - 1)
    inner = build_optimizer(network.parameters(), cfg.optim)
    optimizer = PostLocalSGDOptimizer(inner, averager)
    saved = TrainState([network], inner, run.batches(shard=run.shard), run.world, replicated=True)
    for step in run.steps(saved, lambda: score_replicated(network, run)):
        with step:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(step.x), step.y)
            loss.backward()
            optimizer.step()
            step.log(loss=loss.detach())


def train(cfg: Any, special: str, world: World, prepared: Prepared, folder: Folder) -> dict[str, Any]:
    """One case on this rank; on rank 0 its losses, parameters and scores."""
    scripts = {"": local_sgd, "ddp": ddp_multinode, "torch": SimpleNamespace(main=train_with_torch)}
    return train_script(scripts[special], Run(cfg, folder, world, prepared))


if __name__ == "__main__":
    sys.exit(save_cases(settings, train, *sys.argv[1:]))
