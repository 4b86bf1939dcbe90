"""Train cases of local SGD, of DDP and of torch's PostLocalSGDOptimizer in one launch, for parity tests to compare.

    python -m tests.harness.parity.local_sgd_cases OUT_FILE CACHE PROCESSES key=value,key=value ...
        one argument a case

A case may begin with `ddp` (the same training with DDP), with `torch` (the same training with torch's optimizer), or
with one of MISTAKES, which is planted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from common.api import Run, build_optimizer, init_network
from common.checkpoint.train_state import TrainState
from common.config import config
from common.data.prepare import PreparedDataset
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.techniques.local_sgd.state import LocalState
from common.techniques.local_sgd.worker import LocalWorker
from configs import ddp_multinode as ddp_settings
from configs.local_sgd import Config
from experiments import ddp_multinode, local_sgd
from tests.harness.parity.cases import save_cases, train_script

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
ADAMW = "optim.name=adamw,optim.lr=0.003"
MISTAKES = ("sums_momentum", "momentum_of_rank_0", "averages_first_moments", "counts_workers")
SPECIAL = ("ddp", "torch", *MISTAKES)


def settings(text: str) -> tuple[Any, str]:
    """Return the config of a case, and its prefix: `ddp`, `torch`, a mistake, or nothing."""
    assignments = text.split(",")
    special = assignments.pop(0) if assignments[0] in SPECIAL else ""
    schema = ddp_settings.Config if special == "ddp" else Config
    changes = dict(assignment.split("=") for assignment in assignments)
    return config.build_config(schema, [BASE | changes]), special


def wrap_with_torch(
    network: nn.Module, inner: Optimizer, start: int, every: int
) -> tuple[nn.Module, PostLocalSGDOptimizer]:
    """Return model and optimizer of torch's post-local SGD. Its averager counts from its first step."""
    model = DistributedDataParallel(network)
    state = post_localSGD_hook.PostLocalSGDState(None, None, start, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=every, warmup_steps=start + every - 1)
    return model, PostLocalSGDOptimizer(inner, averager)


def train_with_torch(cfg: Config, run: Run) -> None:
    network = init_network(cfg, run.sample_shape, run.classes).to(run.dtype)
    inner = build_optimizer(network.parameters(), cfg.optim)
    model, optimizer = wrap_with_torch(network, inner, cfg.start, cfg.every)
    run.register(network, inner, run.batches(shard=run.shard), replicated=True)
    for step in run.steps():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(step.x), step.y)
        loss.backward()
        optimizer.step()
        step.log(loss=loss.detach())


def train(cfg: Any, special: str, world: World, prepared: PreparedDataset, folder: RunFolder) -> dict[str, Any]:
    """Train a case on this rank. Return its losses, parameters and scores on rank 0."""
    scripts = {"ddp": ddp_multinode, "torch": SimpleNamespace(main=train_with_torch)}
    run = Run(cfg, folder, Ranks(world), prepared)
    trained = train_script(scripts.get(special, local_sgd), run, *make_mistake(special, world))
    worker = getattr(run.state, "worker", None)
    return trained | {"counts": worker.counts.tolist() if worker else []}


def make_mistake(name: str, world: World) -> list[tuple[Any, str, Any]]:
    """Return the replacements that plant a mistake in local_sgd: object, attribute name, new value."""

    average_correctly = LocalWorker._average_tensors

    def average(worker: LocalWorker, tensors: Sequence[Tensor]) -> list[Tensor]:
        if name == "sums_momentum":
            return [mean * world.size for mean in average_correctly(worker, tensors)]
        copies = [tensor.clone() for tensor in tensors]
        for copy in copies:
            dist.broadcast(copy, 0)
        return copies

    def ends_round(cfg: Config, step: int, total: int) -> bool:
        return step * world.size % cfg.every == 0 or step == total

    def find_first_moments(worker: LocalWorker) -> list[Tensor]:
        return [state["exp_avg"] for state in worker.optimizer.state.values()]

    match name:
        case "sums_momentum" | "momentum_of_rank_0":
            return [(LocalWorker, "_average_tensors", average)]
        case "averages_first_moments":
            return [(LocalWorker, "_find_moments", find_first_moments)]
        case "counts_workers":
            return [(local_sgd, "ends_round", ends_round)]
    return []


def drop_own_state() -> None:
    """Let each worker resume from the mean of all workers, as if they were equal
    (tests/harness/runs/disabled_protection.py).
    """
    LocalState.load = TrainState.load  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(save_cases(settings, train, *sys.argv[1:]))
