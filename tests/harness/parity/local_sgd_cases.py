"""Method of local_sgd. The same training with DDP and with torch's PostLocalSGDOptimizer are cases, too."""

from __future__ import annotations

from collections.abc import Sequence
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
from common.techniques.local_sgd.state import LocalState
from common.techniques.local_sgd.worker import LocalWorker
from configs import ddp_multinode as ddp_settings
from configs.local_sgd import Config
from experiments import ddp_multinode, local_sgd
from tests.harness.parity.method import Outcome, ParityMethod

SETTINGS = (
    "data.name=digits",
    "data.train_limit=120",  # 5 batches an epoch
    "data.test_limit=100",
    "model=mlp",
    "batch=24",
    "optim.lr=0.05",
    "optim.base_batch=24",
    "optim.warmup=5",
    "epochs=8",
    "steps=26",
)
ADAMW = "optim.name=adamw,optim.lr=0.003"


def train(cfg: Config, run: Run) -> Outcome:
    """Train, and return the counts of exchanges and bytes."""
    local_sgd.main(cfg, run)
    if not isinstance(run.state, LocalState):
        return {}
    return {"counts": run.state.worker.counts.tolist()}


def wrap_with_torch(
    network: nn.Module, inner: Optimizer, start: int, every: int
) -> tuple[nn.Module, PostLocalSGDOptimizer]:
    """Return model and optimizer of torch's post-local SGD. Its averager counts from its first step."""
    model = DistributedDataParallel(network)
    state = post_localSGD_hook.PostLocalSGDState(None, None, start, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=every, warmup_steps=start + every - 1)
    return model, PostLocalSGDOptimizer(inner, averager)


# ---- changes: each function gets the function that it replaces as first argument


def train_with_ddp(_: Any, cfg: Config, run: Run) -> None:
    settings = ddp_settings.Config(model=cfg.model, optim=cfg.optim, regularization=cfg.regularization)
    ddp_multinode.main(settings, run)


def train_with_torch(_: Any, cfg: Config, run: Run) -> None:
    network = init_network(cfg, run.sample_shape, run.outputs).to(run.dtype)
    inner = build_optimizer(network.parameters(), cfg.optim)
    model, optimizer = wrap_with_torch(network, inner, cfg.start, cfg.every)
    run.register(network, inner, run.batches(shard=run.shard), replicated=True)
    for step in run.steps():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(step.x), step.y)
        loss.backward()
        optimizer.step()
        step.log(loss=loss.detach())


def sum_tensors(average: Any, worker: LocalWorker, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [mean * dist.get_world_size() for mean in average(worker, tensors)]


def copy_tensors_of_rank_0(_: Any, worker: LocalWorker, tensors: Sequence[Tensor]) -> list[Tensor]:
    copies = [tensor.clone() for tensor in tensors]
    for copy in copies:
        dist.broadcast(copy, 0)
    return copies


def find_first_moments(_: Any, worker: LocalWorker) -> list[Tensor]:
    return [state["exp_avg"] for state in worker.optimizer.state.values()]


def count_steps_of_all_workers(_: Any, cfg: Config, step: int, total: int) -> bool:
    """Return whether a round ends after a step, if the steps of each worker were counted."""
    steps_of_all_workers = step * dist.get_world_size()
    return steps_of_all_workers % cfg.every == 0 or step == total


LOCAL_SGD = ParityMethod(
    name="local_sgd_cases:LOCAL_SGD",
    schema=Config,
    train=train,
    settings=SETTINGS,
    changes={
        "ddp": [(local_sgd, "main", train_with_ddp)],
        "torch": [(local_sgd, "main", train_with_torch)],
        "sums_momentum": [(LocalWorker, "_average_tensors", sum_tensors)],
        "momentum_of_rank_0": [(LocalWorker, "_average_tensors", copy_tensors_of_rank_0)],
        "averages_first_moments": [(LocalWorker, "_find_moments", find_first_moments)],
        "counts_workers": [(local_sgd, "ends_round", count_steps_of_all_workers)],
    },
)


def drop_own_state() -> None:
    """Let each worker resume from the mean of all workers, as if they were equal
    (tests/harness/runs/disabled_protection.py).
    """
    LocalState.load = TrainState.load  # type: ignore[method-assign]
