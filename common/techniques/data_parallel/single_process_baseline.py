"""Timing of training steps outside the training loop, to compare strategies, and reports on the ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from common.data.loader import Loader
from common.measure.memory import describe_peak_memory
from common.measure.step_timing import gather_step_times
from common.measure.timing import time_calls
from common.models import networks
from common.models.sample_dropout import add_dropout
from common.runs.result import Report, ReportData
from common.techniques.data_parallel import ddp
from common.techniques.data_parallel.scaling_report import ScalingReport, time_gradient_all_reduce
from common.techniques.data_parallel.shards import AutoShards
from common.training import optimizers
from common.training.run_context import RunContext
from configs.dataparallel import Sharding
from configs.ddp_multinode import Config
from configs.fields import find_group
from configs.networks import get_network_name
from configs.shared import Regularization

COMPARE_ROUNDS = 3
COMPARE_STEPS = 5  # number of timed steps per strategy and round
MAX_SHARD_LINES = 5
WARM_UP_STEPS = 2
SKIPPED_COMPARISON = "skipped: the other ranks would wait too long for rank 0; raise launch.step_timeout"


def make_step_function(
    run: RunContext, model: Callable[[Tensor], Tensor], module: nn.Module, shard: tuple[int, int] = (0, 1)
) -> Callable[[], Tensor]:
    """Return a function that performs one training step and returns the loss as a scalar tensor.

    Each call trains on the given shard of the next batch. `model` is called for the forward pass; `module` contains the
    parameters to train. The gradients are clipped as in the training of the run.
    """
    regularization = find_group(run.cfg, Regularization)
    clip = regularization.clip if regularization else 0.0
    optimizer = optimizers.build_optimizer(module.train().parameters(), run.training_cfg.optim)
    loader = Loader.from_config(run.train_set, run.training_cfg, run.device, shard=shard)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # continues with the next epoch indefinitely

    def step() -> Tensor:
        x, y = next(batches)
        optimizer.zero_grad()
        loss = run.loss(model(x), y)
        loss.backward()
        if clip:
            clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        return loss

    return step


def time_steps(step: Callable[[], Tensor], device: torch.device, count: int, budget: float = math.inf) -> float:
    """Return the mean duration of up to `count` steps in seconds, after WARM_UP_STEPS steps.

    Timing ends early after `budget` seconds.
    """
    return mean(time_calls(step, device, count, warm_up=WARM_UP_STEPS, budget=budget))


def can_wait_for_rank_0(run: RunContext, steps: int, take_step: Callable[[], Tensor] | None) -> bool:
    """Return whether rank 0 can take `steps` steps on the whole batch while the other ranks wait.

    The estimated duration must not exceed half of launch.step_timeout. If this attempt has not timed its own steps,
    rank 0 calls `take_step` once to measure the duration. All ranks must call this function.
    """
    world = run.world
    if world.size == 1:
        return True
    step_seconds = world.size * run.compute_step_seconds()
    if not step_seconds and take_step is not None:
        (step_seconds,) = time_calls(take_step, run.device, 1, warm_up=0)
    return bool(world.broadcast(steps * step_seconds <= world.timeout.total_seconds() / 2))


def time_single_rank(cfg: Config, run: RunContext) -> float:
    """Return the mean duration in seconds of a step in which rank 0 alone trains on the whole batch.

    The step is that of the run: with dropout, clipping and recomputation. The other ranks wait. The result is 0 if they
    would wait too long. All ranks must call this function.
    """
    step = None
    if run.world.is_main:
        model = networks.build_network(cfg.model, run.sample_shape, run.outputs).to(run.device, run.dtype)
        add_dropout(model, cfg.regularization.dropout, cfg.seed)
        if cfg.memory.recompute != "none":
            from common.techniques.recompute.api import recompute_blocks  # imported here because few runs recompute

            recompute_blocks(model, cfg.memory.recompute)
        step = make_step_function(run, model, model)
    if not can_wait_for_rank_0(run, WARM_UP_STEPS + 1, step):
        return 0.0
    budget = min(10.0, run.world.timeout.total_seconds() / 4)
    seconds = time_steps(step, run.device, count=20, budget=budget) if step else 0.0
    return float(run.world.broadcast(seconds))


@dataclass(frozen=True)
class StepVariant:
    """One of several ways to perform a training step, whose speeds are compared with each other."""

    name: str
    threads: int
    make_model: Callable[[], tuple[Callable[[Tensor], Tensor], nn.Module]]
    """Function that returns the callable for the forward pass and the module whose parameters are trained."""
    shard: tuple[int, int] | None
    """This rank trains on shard r of n of each batch, given as (r, n); None if rank 0 trains alone."""


def measure_variant_throughputs(run: RunContext, sides: Sequence[StepVariant]) -> dict[str, list[float]]:
    """Measure the throughput of each variant in samples/s, one value per round.

    In each round, the variants are timed one after another. The result is {} if the other ranks would wait too long
    for rank 0. All ranks must call this function.
    """
    world = run.world
    rates = {side.name: list[float]() for side in sides}
    step_functions = {}
    single_step = None
    for side in sides:
        if side.shard or world.is_main:
            step_functions[side.name] = make_step_function(run, *side.make_model(), side.shard or (0, 1))
        if not side.shard:
            single_step = single_step or step_functions.get(side.name)
    if not can_wait_for_rank_0(run, WARM_UP_STEPS + COMPARE_STEPS, single_step):
        return {}
    for number in range(COMPARE_ROUNDS):
        for side in sides:
            run.log_message(f"comparison, round {number + 1} of {COMPARE_ROUNDS}: {side.name}")
            torch.set_num_threads(side.threads)
            if side.name in step_functions:
                seconds = time_steps(step_functions[side.name], run.device, COMPARE_STEPS)
                rates[side.name].append(run.training_cfg.batch / seconds)
            world.wait_for_all_ranks(f"compare/{number}/{side.name}")
    torch.set_num_threads(world.threads)
    return rates


def report_rank_differences(sharding: Sharding, run: RunContext) -> list[ReportData]:
    """Report how ranks differ: unequal shards and, with launch.mixed=true, different devices.

    All ranks must call this function.
    """
    reports = []
    if sharding.shards != ["equal"]:
        reports.append(report_shards(run))
    if run.cfg.launch.mixed:
        reports.append(report_rank_devices(run))
    return reports


def report_rank_devices(run: RunContext) -> ReportData:
    """Report each rank's device, and the time to copy the gradients of one step to the host and back.

    All ranks must call this function.
    """
    assert run.state is not None
    device = "cpu"
    seconds = 0.0
    if run.device.type == "cuda":
        device = torch.cuda.get_device_name(run.device)
        size = sum(parameter.numel() for _, parameter in run.state.parameters)
        gradients = torch.zeros(size, dtype=run.dtype, device=run.device)
        seconds = median(time_calls(lambda: gradients.copy_(gradients.cpu()), run.device, 5))
    rows = []
    measured: dict[str, Any] = {"rank_devices": [], "copy_seconds": []}
    for rank, (name, copy_seconds) in enumerate(run.world.gather([device, seconds])):
        rows.append(f"rank {rank}: {name}, {copy_seconds * 1e3:.2f} ms per step to copy gradients")
        measured["rank_devices"].append(name)
        measured["copy_seconds"].append(copy_seconds)
    return ReportData({"devices": "\n".join(rows)}, measured=measured)


def report_shards(run: RunContext) -> ReportData:
    """Report the number of samples of each rank and, with shards=auto, every change in this attempt."""
    assert run.state is not None and isinstance(run.state.loader, Loader)
    auto_shards = run.find_hook(AutoShards)
    history = auto_shards.history if auto_shards else [(1, run.state.loader.counts)]
    history = [(max(step, run.resumed_after + 1), counts) for step, counts in history]
    lines = [f"{' + '.join(map(str, counts))} samples, starting from step {step}" for step, counts in history]
    omitted = len(lines) - MAX_SHARD_LINES
    if omitted > 0:
        lines = [*lines[omitted:], f"(number of earlier changes not shown: {omitted})"]
    return ReportData({"shards": "\n".join(lines)}, measured={"shards": history})


def report_scaling(cfg: Config, run: RunContext, model: nn.Module) -> list[Report]:
    """Report the efficiency of data-parallel training.

    With cfg.compare, rank 0 also trains a separate model alone for comparison. All ranks must call this function after
    training.
    """
    communication = None
    if cfg.strategy == "ddp" and cfg.communication != "powersgd":
        number_bytes = ddp.HOOK_ELEMENT_BYTES.get(cfg.communication, run.dtype.itemsize)
        communication = time_gradient_all_reduce(model, cfg.bucket_mb, number_bytes)
    single_rank_seconds = time_single_rank(cfg, run) if cfg.compare else 0.0
    skipped = []
    if cfg.compare and not single_rank_seconds:
        skipped.append(ReportData({"comparison": SKIPPED_COMPARISON}))
    samples: float | None = run.local_samples_if_unequal
    auto_shards = run.find_hook(AutoShards)
    if auto_shards:
        samples = auto_shards.average_local_samples(run.resumed_after + 1, run.step)
    times = gather_step_times(run.world, run.times, samples)
    shards = f" = {run.world.size} x {cfg.batch_plan.shard}" if cfg.sharding.shards == ["equal"] else ""
    return [
        ReportData({"strategy": f"{cfg.strategy}, {get_network_name(cfg.model)}, batch {cfg.batch}{shards}"}),
        *skipped,
        *report_rank_differences(cfg.sharding, run),
        ReportData({"peak memory": describe_peak_memory(run.memory, run.device)}),
        ScalingReport(times, run.world.hosts, run.compute_step_seconds(), communication, single_rank_seconds),
    ]
