"""Training steps timed apart from the training: by one rank alone, by strategies in turns, by all to fit shards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.data.loader import Loader
from common.data.rounds import Rounds
from common.data.shards import AutoShards, Speed
from common.distributed import ddp, sync_batchnorm
from common.measure.memory import describe_peak_memory, report_state_bytes
from common.measure.step_timing import ScalingReport, gather_step_times, time_communication
from common.measure.timing import time_calls
from common.models import networks
from common.models.sample_dropout import add_dropout
from common.runs.result import Facts, Report
from common.training import optimizers
from common.training.run_context import RunContext
from configs.dataparallel import Sharded
from configs.ddp_multinode import Config

ROUNDS, STEPS = 3, 5  # of a comparison: how often each side takes its turn, and for how many steps
TIMING, TIMINGS = 0.05, 8  # seconds of a timing for shards, several of a scheduler's time slices; and how many


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
        add_dropout(model, getattr(run.cfg, "dropout", 0.0), run.cfg.seed)  # it takes time
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


def set_up_shards(cfg: Sharded, run: RunContext, batches: Loader, model: nn.Module) -> None:
    """Prepare the model of each rank, without its wrapper, for unequal shards. All ranks call it.

    With shards=auto, measure what a step takes each rank, in the autocast of the caller, and choose them accordingly.
    """
    if cfg.shards != ["equal"] and sync_batchnorm.list_own_norms(model):
        remedy = "; sync_batchnorm=true does not" if hasattr(cfg, "sync_batchnorm") else ""
        words = "BatchNorm sees each rank's own shard: unequal ones give another result than equal ones"
        run.log_message(words + remedy)
    if not batches.own_samples:
        sync_batchnorm.skip_empty_batches(model)
    if cfg.shards == ["auto"] and run.world.size > 1:
        own = measure_speed(run, model, sum(batches.counts))
        run.shards = AutoShards(batches, run.world, own, run.log_message)


def measure_speed(run: RunContext, model: nn.Module, batch: int) -> Speed:
    """Measure what forward and backward take on this rank, at two sizes, all ranks at the same time, as they train.

    Of several timings the shortest counts, which other programs have disturbed least; each is so long that a program
    that always shares the core is seen.
    """
    many = max(2, batch // run.world.size)
    few = max(1, many // 4)
    parameters = list(model.parameters())

    def time_shortest(x: Tensor) -> float:
        def compute() -> None:  # DDP does not see gradients that are not accumulated
            torch.autograd.grad(model(x).sum(), parameters, allow_unused=True)

        (once,) = time_calls(compute, run.device, 1)
        calls = math.ceil(TIMING / once)
        run.world.named_barrier(f"shards/{len(x)}")
        budget = max(TIMINGS * TIMING, (TIMINGS - 1) * once)

        def compute_often() -> None:
            for _ in range(calls):
                compute()

        times = time_calls(compute_often, run.device, 1000, warm_up=0, budget=budget)
        return min(times) / calls

    x = run.load_example(many)
    with ddp.restore_buffers_and_rng(model, run.device):
        return Speed.fit(few, many, [time_shortest(x[:few]), time_shortest(x)])


def report_ranks(cfg: Sharded, run: RunContext) -> list[Facts]:
    """Report in what ranks differ: shards, and with launch.mixed=true devices. All ranks call it."""
    shards = [] if cfg.shards == ["equal"] else [report_shards(run)]
    return [*shards, report_devices(run)] if cfg.launch.mixed else shards


def report_devices(run: RunContext) -> Facts:
    """Report the device of each rank, and the seconds in which it copies a step's gradients to the host and back."""
    assert run.state is not None
    seconds, name = 0.0, "cpu"
    if run.device.type == "cuda":
        size = sum(parameter.numel() for _, parameter in run.state.parameters)
        flat, name = torch.zeros(size, dtype=run.dtype, device=run.device), torch.cuda.get_device_name(run.device)
        seconds = median(time_calls(lambda: flat.copy_(flat.cpu()), run.device, 5))
    found = run.world.gather([name, seconds])
    rows = [f"rank {rank}: {device}, copies {took * 1e3:.2f} ms a step" for rank, (device, took) in enumerate(found)]
    measured = {"rank_devices": [device for device, _ in found], "copy_seconds": [took for _, took in found]}
    return Facts({"devices": "\n".join(rows)}, measured=measured)


def report_shards(run: RunContext) -> Facts:
    """Report the shards of the ranks, and with shards=auto every change in this attempt."""
    assert run.state is not None and not isinstance(run.state.loader, Rounds)
    history = run.shards.history if run.shards else [(1, run.state.loader.counts)]
    history = [(max(step, run.resumed_after + 1), counts) for step, counts in history]
    shown = [f"{' + '.join(map(str, counts))} samples from step {step} on" for step, counts in history]
    more = [f"and {len(shown) - 5} changes before"] if len(shown) > 5 else []
    return Facts({"shards": "\n".join([*shown[-5:], *more])}, measured={"shards": history})


def report_scaling(cfg: Config, run: RunContext, model: nn.Module) -> list[Report]:
    """Report how well the ranks of data parallelism work together. All ranks call it after training.

    With cfg.compare one rank trains a model of its own to find the efficiency.
    """
    communication = None
    if cfg.strategy == "ddp" and cfg.communication != "powersgd":
        size = ddp.BYTES.get(cfg.communication, run.dtype.itemsize)
        communication = time_communication(model, cfg.bucket_mb, size)
    alone = time_one_rank(run, cfg.model) if cfg.compare else 0.0
    samples: float | None = run.own_unequal_samples
    if run.shards:
        samples = run.shards.average_own_samples(run.resumed_after + 1, run.step)
    times = gather_step_times(run.world, run.times, samples)
    shards = f" = {run.world.size} x {cfg.batch_plan.shard}" if cfg.shards == ["equal"] else ""
    batch = f"batch {cfg.batch}{shards}"
    strategy = Facts({"strategy": f"{cfg.strategy}, {cfg.model}, {batch}"})
    assert run.state is not None and run.state.optimizer is not None
    state = report_state_bytes(run.state.optimizer, run.world)
    peak = Facts({"peak memory": describe_peak_memory(run.memory, run.device)})
    return [
        strategy,
        *report_ranks(cfg, run),
        state,
        peak,
        ScalingReport(times, run.world.hosts, run.step_seconds(), communication, alone),
    ]
