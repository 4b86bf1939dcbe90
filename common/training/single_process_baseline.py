"""Training steps timed apart from the training: by one rank alone, or by several strategies in turns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.data.loader import Loader
from common.distributed import ddp
from common.measure.memory import describe_peak_memory, report_state_bytes
from common.measure.step_timing import ScalingReport, gather_step_times, time_communication
from common.measure.timing import time_calls
from common.models import networks
from common.runs.result import Facts, Report
from common.training import optimizers
from common.training.run_context import RunContext
from configs.ddp_multinode import Config

ROUNDS, STEPS = 3, 5  # of a comparison: how often each side takes its turn, and for how many steps


def make_step_function(
    run: RunContext, model: Callable[[Tensor], Tensor], parameters: nn.Module, shard: tuple[int, int] = (0, 1)
) -> Callable[[], Tensor]:
    """Return a function that takes one step with the next batch, or with a shard of it, and returns the loss []."""
    optimizer = optimizers.build_optimizer(parameters.train().parameters(), run.cfg.optim)
    loader = Loader.from_config(run.train_set, run.cfg, run.device, shard=shard)
    batches = (batch for _ in itertools.count() for batch in loader)

    def step() -> Tensor:
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def time_steps(step: Callable[[], Tensor], device: torch.device, count: int, patience: float = math.inf) -> float:
    """Return the mean seconds of `count` steps after two to warm up, or of fewer if these take `patience` seconds."""
    return mean(time_calls(step, device, count, warm_up=2, budget=patience))


def time_one_rank(run: RunContext, name: str, count: int = 20, patience: float = 10.0) -> float:
    """Return the mean seconds of a step of rank 0 alone with the whole batch; the others wait. All ranks call it."""
    seconds = 0.0
    if run.world.is_main:
        model = networks.build_network(name, run.sample_shape, run.classes).to(run.device, run.dtype)
        seconds = time_steps(make_step_function(run, model, model), run.device, count, patience)
    return float(run.world.broadcast(seconds))


@dataclass(frozen=True)
class Side:
    """A side of a comparison of training steps."""

    name: str
    threads: int
    make_model: Callable[[], tuple[Callable[[Tensor], Tensor], nn.Module]]
    """Return the forward and the module whose parameters are trained."""
    shard: tuple[int, int] | None
    """Shard (r, n) of each batch that this rank takes; None where rank 0 alone takes all of it."""


def compare_sides(run: RunContext, sides: Sequence[Side]) -> dict[str, list[float]]:
    """Return samples/s of each side, round by round; the sides take turns. All ranks call it."""
    world, rates = run.world, {side.name: list[float]() for side in sides}
    own = [side for side in sides if side.shard or world.is_main]
    steppers = {side.name: make_step_function(run, *side.make_model(), side.shard or (0, 1)) for side in own}
    for number in range(ROUNDS):
        for side in sides:
            run.log_message(f"comparison, round {number + 1} of {ROUNDS}: {side.name}")
            torch.set_num_threads(side.threads)
            if side.name in steppers:
                rates[side.name].append(run.cfg.batch / time_steps(steppers[side.name], run.device, STEPS))
            world.named_barrier(f"compare/{number}/{side.name}")
    torch.set_num_threads(world.threads)
    return rates


def report_scaling(cfg: Config, run: RunContext, model: nn.Module) -> list[Report]:
    """Report how well the ranks of data parallelism work together. All ranks call it after training.

    With cfg.compare one rank trains a model of its own to find the efficiency.
    """
    communication = None
    if cfg.strategy == "ddp" and cfg.communication != "powersgd":
        size = ddp.BYTES.get(cfg.communication, run.dtype.itemsize)
        communication = time_communication(model, cfg.bucket_mb, size)
    alone = time_one_rank(run, cfg.model) if cfg.compare else 0.0
    times = gather_step_times(run.world, run.times)
    batch = f"batch {cfg.batch} = {run.world.size} x {cfg.batch_plan.shard}"
    strategy = Facts({"strategy": f"{cfg.strategy}, {cfg.model}, {batch}"})
    assert run.state is not None and run.state.optimizer is not None
    state = report_state_bytes(run.state.optimizer, run.world)
    peak = Facts({"peak memory": describe_peak_memory(run.memory, run.device)})
    return [strategy, state, peak, ScalingReport(times, run.world.hosts, run.step_seconds(), communication, alone)]
