"""Division of a batch among ranks of unequal speed, based on a model of each rank's step time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from common.data.loader import Loader
from common.measure.timing import time_calls
from common.techniques.data_parallel import sync_batchnorm
from common.techniques.data_parallel.ddp import restore_buffers_and_rng
from common.training.hooks import StepHook
from common.training.run_context import RunContext
from configs.batch_plan import divide_batch
from configs.dataparallel import Sharding

SPEED_SECONDS = 0.05  # minimum duration of one timing, so that it spans several time slices of the operating system
SPEED_TIMINGS = 8
WINDOW = 15  # number of steps between two updates of the shards
GAIN = 0.05  # minimum fraction of the step time that new shards must save; smaller gains may be noise


@dataclass(frozen=True)
class StepTimeModel:
    """Linear model of a rank's step time, excluding the time in which the rank waits for other ranks.

    A step with n samples takes base + per_sample * n seconds.
    """

    base: float
    per_sample: float

    @classmethod
    def fit(cls, small: int, large: int, seconds: Sequence[float]) -> StepTimeModel:
        """Fit the model to the measured times, in seconds, of a step with `small` and a step with `large` samples.

        If `base` or `per_sample` would be negative, `base` is set to 0 and only the time for `large` samples is used.
        """
        slope = (seconds[1] - seconds[0]) / (large - small)
        base = seconds[0] - slope * small
        if slope > 0 and base >= 0:
            return cls(base, slope)
        return cls(0.0, seconds[1] / large)

    def predict_step_seconds(self, samples: int) -> float:
        """Return the predicted duration of a step with `samples` samples, in seconds."""
        return self.base + self.per_sample * samples

    def rescale_line(self, samples: int, seconds: float) -> StepTimeModel:
        """Return the model, scaled so that a step with `samples` samples takes `seconds` seconds."""
        factor = seconds / self.predict_step_seconds(samples)
        return StepTimeModel(self.base * factor, self.per_sample * factor)

    def __str__(self) -> str:
        return f"{self.base * 1e3:.3g} + {self.per_sample * 1e3:.3g} n ms"


def predict_slowest_rank_seconds(speeds: Sequence[StepTimeModel], counts: Sequence[int]) -> float:
    """Return the predicted duration of a step on the slowest rank, in seconds."""
    return max(speed.predict_step_seconds(count) for speed, count in zip(speeds, counts, strict=True))


def choose_shard_sizes(speeds: Sequence[StepTimeModel], batch: int) -> tuple[int, ...]:
    """Return the number of samples of each rank, chosen to minimize the step time of the slowest rank.

    Each rank gets at least one sample, because the speed of a rank without samples cannot be measured. Each further
    sample is given to the rank that would finish first with this additional sample.
    """
    counts = [1] * len(speeds)
    heap = [(speed.predict_step_seconds(2), rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(heap)
    for _ in range(batch - len(speeds)):
        rank = heap[0][1]
        counts[rank] += 1
        heapq.heapreplace(heap, (speeds[rank].predict_step_seconds(counts[rank] + 1), rank))
    return tuple(counts)


class AutoShards(StepHook):
    """Shard sizes that adapt to the speeds of the ranks (shards=auto).

    All ranks use the same measurements and therefore choose the same shards.
    """

    def __init__(self, run: RunContext, measure_speed: Callable[[int], StepTimeModel]) -> None:
        """Use the loader that is registered with the run.

        `measure_speed(batch)` measures the step time model of this rank while all ranks are computing. `batch` is the
        number of samples of a batch over all ranks.
        """
        self.run = run
        self.measure_speed = measure_speed
        self.log_message = run.log_message
        self.speeds: list[StepTimeModel] = []
        """Step time models of all ranks; empty before `before_load`."""
        self.history: list[tuple[int, tuple[int, ...]]] = []
        """Pairs (first step, number of samples of each rank), one for each set of shards used in this attempt."""

    @property
    def loader(self) -> Loader:
        """Loader whose batches are divided."""
        assert self.run.state is not None
        return cast(Loader, self.run.state.loader)

    def before_load(self) -> None:
        """Measure the speeds of all ranks, and choose the first shards."""
        speed = self.measure_speed(sum(self.loader.counts))
        lines = self.run.world.all_gather([speed.base, speed.per_sample])
        self.speeds = [StepTimeModel(*line) for line in lines]
        self.history = [(1, self.loader.counts)]
        measured = ", ".join(f"{speed} on rank {rank}" for rank, speed in enumerate(self.speeds))
        if not self._change_shards_if_faster(1, f"a step with n samples takes {measured}"):
            self.log_message(f"shards=auto: using equal shards, because a step with n samples takes {measured}")

    def average_local_samples(self, first_step: int, last_step: int) -> float:
        """Return the mean number of samples of this rank per batch over a range of steps.

        Both `first_step` and `last_step` are included, and must belong to this attempt.
        """
        ends = [first for first, _ in self.history[1:]] + [last_step + 1]
        samples = 0
        steps = 0
        for (first, counts), end in zip(self.history, ends, strict=True):
            overlap = max(0, end - max(first, first_step))
            samples += counts[self.run.world.rank] * overlap
            steps += overlap
        return samples / steps if steps else float(self.loader.local_samples)

    def on_start(self) -> None:
        """Write the first shards to metrics.jsonl."""
        self._write_metrics()

    def between_steps(self, number: int) -> None:
        """Adapt the shards to the latest step times of the ranks, every WINDOW steps."""
        run = self.run
        if run.times is None or number % WINDOW or number == run.total:
            return
        seconds = run.times.measure_seconds_to_last_gradient(WINDOW)
        if seconds is not None and self.update_shards(number, seconds):
            self._write_metrics()

    def _write_metrics(self) -> None:
        """Write the number of samples of each rank in a full batch to metrics.jsonl."""
        assert self.run.metrics is not None
        values = {f"shard_{rank}": float(count) for rank, count in enumerate(self.loader.counts)}
        self.run.metrics.write_values(self.run.step, values)

    def update_shards(self, step: int, seconds: float) -> bool:
        """Choose the shards for the steps after `step`; return True if they have changed.

        `seconds` is the typical duration of this rank's latest steps, without the time spent waiting for other ranks.
        All of these steps must have used the current shards. All ranks must call this method.
        """
        durations = self.run.world.all_gather(seconds)
        counts = self.loader.counts
        for rank, duration in enumerate(durations):
            self.speeds[rank] = self.speeds[rank].rescale_line(counts[rank], duration)
        measured = ", ".join(f"{duration * 1e3:.3g} ms on rank {rank}" for rank, duration in enumerate(durations))
        return self._change_shards_if_faster(step + 1, f"a step without waiting takes {measured}")

    def _change_shards_if_faster(self, step: int, reason: str) -> bool:
        """Change the shards and log the change, if the slowest rank would become clearly faster.

        `step` is the first step with the new shards. Returns True if the shards have changed.
        """
        counts = choose_shard_sizes(self.speeds, sum(self.loader.counts))
        current_seconds = predict_slowest_rank_seconds(self.speeds, self.loader.counts)
        seconds = predict_slowest_rank_seconds(self.speeds, counts)
        if seconds > (1 - GAIN) * current_seconds:
            return False
        self.loader.set_shards(self.run.world.rank, counts)
        self.history = [change for change in self.history if change[0] < step]
        self.history.append((step, counts))
        self.log_message(
            f"shards=auto: using shards [{','.join(map(str, counts))}] from step {step}, because {reason}; "
            f"this reduces the step time of the slowest rank to {seconds / current_seconds:.0%} of its previous value"
        )
        return True


def set_up_shards(
    sharding: Sharding, run: RunContext, model: nn.Module, forward: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Prepare a model for the setting `shards`. All ranks must call this function.

    `model` must not be wrapped, for example by DDP. With shards=auto, the duration of forward and backward is measured
    on each rank before the first step. `forward` computes the outputs of the model, by default by calling the model.
    """
    if sharding.shards == ["equal"]:
        return
    if sync_batchnorm.list_unsynchronized_norms(model):
        remedy = "; sync_batchnorm=true avoids this" if hasattr(run.cfg, "sync_batchnorm") else ""
        run.log_message(f"BatchNorm normalizes over each rank's shard, so unequal shards change the result{remedy}")
    plan = run.training_cfg.batch_plan
    counts = divide_batch(plan.batch // plan.microbatches, plan.weights)
    if not counts[run.world.rank]:
        sync_batchnorm.accept_empty_batches(model)
    if sharding.shards == ["auto"] and run.world.size > 1:
        run.add_hook(AutoShards(run, partial(measure_rank_speed, run, model, forward or model)))


def measure_rank_speed(
    run: RunContext, model: nn.Module, forward: Callable[[Tensor], Tensor], batch: int
) -> StepTimeModel:
    """Fit a step time model to the duration of forward and backward on this rank for two shard sizes.

    The shortest of several timings is used, because it is the one that other programs have disturbed the least. Each
    timing is long enough to include the slowdown by a program that runs on the same core all the time. All ranks must
    call this function at the same time.
    """
    large = max(2, batch // run.world.size)
    small = max(1, large // 4)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def time_shortest(x: Tensor) -> float:
        def compute() -> None:  # does not accumulate gradients, which would trigger the hooks of DDP
            torch.autograd.grad(forward(x).sum(), parameters, allow_unused=True)

        (seconds,) = time_calls(compute, run.device, 1)
        calls = math.ceil(SPEED_SECONDS / seconds)
        run.world.wait_for_all_ranks(f"shards/{len(x)}")
        budget = max(SPEED_TIMINGS * SPEED_SECONDS, (SPEED_TIMINGS - 1) * seconds)

        def compute_repeatedly() -> None:
            for _ in range(calls):
                compute()

        times = time_calls(compute_repeatedly, run.device, 1000, warm_up=0, budget=budget)
        return min(times) / calls

    x = run.load_first_inputs(large)
    with restore_buffers_and_rng(model, run.device):
        return StepTimeModel.fit(small, large, [time_shortest(x[:small]), time_shortest(x)])
