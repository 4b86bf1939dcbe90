"""Timing of data-parallel steps: times of each rank, stragglers, and exposed communication.

The all-reduce makes the steps of all ranks equally long, so the step time cannot identify a slow rank. Instead, ranks
are compared by the time from the start of a step to the start of backward. Before backward, ranks do not wait for each
other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.measure.device_clock import DeviceClock, Stamp
from common.measure.straggler import find_straggler
from common.measure.timing import time_calls
from common.ranks.rendezvous import World
from common.runs.result import ReportData

T = TypeVar("T")
queue_callback = torch.autograd.Variable._execution_engine.queue_callback  # for the end of a backward pass
HISTORY = 1000
"""Maximum number of steps whose timestamps are stored. Older timestamps are discarded."""
NEWEST_STEPS = 50
"""Number of newest steps that determine the current speed of a rank."""
WARM_UP = 10
"""Number of steps at the start of a run that are excluded from measurements."""
MIN_STEPS = 10
"""Minimum number of measured steps before a rank can be reported as a straggler."""


@dataclass(frozen=True)
class RankTimes:
    """Times of one rank in a typical step, in seconds."""

    data: float
    """Mean time spent waiting for a batch."""
    before_backward: float
    """Time from the start of a step to the start of backward, excluding the time spent waiting for other ranks."""
    step: float
    """Mean duration of the entire step."""
    steps: int
    """Number of measured steps."""
    rank: int = 0
    exposed: Sequence[float] = ()
    """Time of communication in each step between the last gradient and the end of backward."""
    samples: float | None = None
    """Mean number of this rank's samples per batch if the shards are unequal; None if the shards are equal."""


class StepDurations:
    """Durations of the steps of this attempt, measured with the clock of the host.

    Time that is not spent on training, such as an evaluation between two steps, is excluded.
    """

    def __init__(self) -> None:
        self.durations: list[float] = []  # in seconds
        self.mark: float | None = None  # value of time.perf_counter() from which the next step is measured

    def record_step_end(self, now: float) -> None:
        """Record the end of a step. `now` is the current value of time.perf_counter()."""
        if self.mark is not None:
            self.durations.append(now - self.mark)
        self.mark = now

    def exclude_pause(self) -> None:
        """Exclude the time since the last step from the duration of the next step."""
        self.mark = time.perf_counter()

    def is_next_step_first_steady(self, left: int) -> bool:
        """Return whether the next step is the first step that counts toward the mean duration.

        `left` is the number of steps that remain in the run. The mean duration does not include the first WARM_UP
        steps. In a short run, only the first third of the steps is excluded.
        """
        done = len(self.durations) + (self.mark is not None)  # the first step only sets the mark
        return done == min(WARM_UP, (done + left) // 3)

    def list_steady_durations(self) -> list[float]:
        """Return the durations in seconds of all steps after the first WARM_UP steps.

        In a short run, only the first third of the steps is excluded.
        """
        return self.durations[min(WARM_UP, len(self.durations) // 3) :]

    def compute_mean_duration(self) -> float:
        """Return the mean step duration in seconds, without the first steps.

        The method `list_steady_durations` excludes the first steps. The result is 0 if there are no other steps.
        """
        return fmean(self.list_steady_durations() or [0.0])


class StepTimestamps(NamedTuple):
    """Timestamps of one step."""

    marks: dict[str, Stamp]
    """Timestamps by name, such as "start" and "backward"."""
    layer_spans: list[tuple[Stamp, Stamp]]
    """Start and end of the forward pass of each sharded layer."""
    waited: float
    """Seconds that synchronized BatchNorm waited for other ranks during the forward pass."""


class StepTimer:
    """A recorder of timestamps within the steps of one rank."""

    def __init__(self, model: nn.Module, device: torch.device, sharded: Iterable[nn.Module] = ()) -> None:
        """Install hooks in the model that record timestamps.

        `sharded` contains the layers that gather their parameters in the forward pass. If there are such layers, the
        forward time is the sum of their computing times, without the time spent waiting for parameters.
        """
        self.model = model
        self.clock = DeviceClock(device)
        self.layer_starts: list[Stamp] = []
        self.layer_spans: list[tuple[Stamp, Stamp]] = []
        # The hooks of fully_shard gather the parameters before these hooks record the start, and free the parameters
        # after these hooks have recorded the end.
        for layer in sharded:
            layer.register_forward_pre_hook(lambda *_: self.layer_starts.append(self.clock.stamp()))
            layer.register_forward_hook(self._record_layer_span, prepend=True)
        self.history: deque[StepTimestamps] = deque(maxlen=HISTORY)
        self.marks: dict[str, Stamp] = {}
        self.steps_to_skip = WARM_UP

        # Backward computes the gradient of the first parameter last.
        next(model.parameters()).register_hook(lambda _: self.record_mark("last gradient"))

    def _record_layer_span(self, *_: object) -> None:
        """Store the start and the end of the forward pass of a sharded layer."""
        self.layer_spans.append((self.layer_starts.pop(), self.clock.stamp()))

    def record_mark(self, name: str) -> None:
        """Record the current time under a name."""
        self.marks[name] = self.clock.stamp()

    def watch_backward(self, loss: Tensor) -> None:
        """Record the marks "backward" and "end of backward" in the backward pass of a loss.

        Only the first backward pass of a step is recorded.
        """

        def record_start(_: Tensor) -> None:
            if "backward" not in self.marks:
                self.record_mark("backward")
                queue_callback(queue_end)

        def queue_end() -> None:
            # DDP and FSDP have queued callbacks during backward, which wait for their communication. A callback that is
            # queued now runs after them.
            queue_callback(lambda: self.record_mark("end of backward"))

        loss.register_hook(record_start)

    def iterate_batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches of a loader, and record the timestamps of each step.

        A step lasts from the request for a batch until the request for the next batch.
        """
        source = iter(loader)
        while True:
            self.clock.refresh_reference_event()
            self.marks = {"start": self.clock.stamp()}
            self.layer_starts = []
            self.layer_spans = []
            batch = next(source, None)
            if batch is None:
                return
            self.record_mark("data")
            yield batch
            self.record_mark("end")
            self._store_step()

    def _store_step(self) -> None:
        """Store the timestamps of the finished step, except for the first WARM_UP steps."""
        waited = pop_total_waiting_seconds(self.model)
        if "backward" not in self.marks:  # the experiment does not mark the start of backward
            return
        if self.steps_to_skip:
            self.steps_to_skip -= 1
        else:
            self.history.append(StepTimestamps(self.marks, self.layer_spans, waited))

    def _measure_step(self, step: StepTimestamps) -> dict[str, float]:
        """Return the durations of the parts of a step in seconds, by name.

        The duration of the forward pass does not include the time spent waiting for other ranks.
        """
        to_seconds = self.clock.to_seconds
        times = {name: to_seconds(stamp) for name, stamp in step.marks.items()}
        if step.layer_spans:
            forward = sum(to_seconds(end) - to_seconds(start) for start, end in step.layer_spans)
        else:
            forward = times["backward"] - times["data"] - step.waited
        seconds = {
            "data": times["data"] - times["start"],
            "forward": forward,
            "step": times["end"] - times["start"],
        }
        if "last gradient" in times:
            seconds["to last gradient"] = times["last gradient"] - times["start"]
            if "end of backward" in times:
                seconds["exposed"] = times["end of backward"] - times["last gradient"]
        return seconds

    def measure_seconds_to_last_gradient(self, steps: int) -> float | None:
        """Return the median time in seconds from step start to last gradient.

        A rank does not wait for other ranks before the last gradient, except in synchronized BatchNorm. The median is
        computed over the newest `steps` steps. Returns None if fewer steps are stored. On a GPU, this method waits
        until the GPU has finished the newest steps.
        """
        newest = [self._measure_step(step) for step in list(self.history)[-steps:]]
        return median(step["to last gradient"] for step in newest) if len(newest) == steps else None

    def estimate_seconds_to_backward(self) -> float | None:
        """Return the median time in seconds from step start to backward.

        The median is computed over the NEWEST_STEPS newest steps. Returns None if fewer than MIN_STEPS steps have been
        measured. On a GPU, only finished steps are used, so that this method never waits for the GPU.
        """
        finished = [step for step in self.history if self.clock.has_reached_stamp(step.marks["end"])]
        if len(finished) < MIN_STEPS:
            return None
        newest = [self._measure_step(step) for step in finished[-NEWEST_STEPS:]]
        return median(step["data"] + step["forward"] for step in newest)

    def summarize_steps(self) -> RankTimes | None:
        """Return typical times over all stored steps; None if no steps are stored."""
        if not self.history:
            return None
        steps = [self._measure_step(step) for step in self.history]
        data = fmean(step["data"] for step in steps)  # not a median, because the loader prepares several steps at once
        forward = median(step["forward"] for step in steps)
        duration = fmean(step["step"] for step in steps)
        exposed = [step["exposed"] for step in steps if "exposed" in step]
        return RankTimes(data, data + forward, duration, len(steps), exposed=exposed)


def gather_step_times(world: World, times: StepTimer | None, samples: float | None = None) -> list[RankTimes]:
    """Gather the step times of all ranks on rank 0.

    All ranks must call this function. On ranks other than 0, the function returns an empty list. Ranks that have
    recorded no step times are omitted. `samples` is the mean number of this rank's samples per batch if the shards are
    unequal, otherwise None.
    """
    summary = times.summarize_steps() if times else None
    gathered = world.gather(asdict(summary) | {"samples": samples} if summary else None)
    return [RankTimes(**fields | {"rank": rank}) for rank, fields in enumerate(gathered) if fields]


def time_gradient_all_reduce(model: nn.Module, bucket_mb: float, size: int, repeats: int = 5) -> float | None:
    """Return the median time in seconds of an all-reduce of all gradients, without computation.

    All ranks must call this function. Returns None if there is only one rank. The gradients are sent in buckets of
    `bucket_mb` MiB, as floating-point numbers of `size` bytes.
    """
    if dist.get_world_size() == 1:
        return None
    parameters = list(model.parameters())
    dtype = {2: torch.float16, 4: torch.float32, 8: torch.float64}[size]
    count = sum(parameter.numel() for parameter in parameters)
    flat = torch.zeros(count, dtype=dtype, device=parameters[0].device)
    buckets = flat.split(max(1, int(bucket_mb * 2**20) // size))

    def all_reduce_buckets() -> None:
        works = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
        for work in works:
            assert work is not None
            work.wait()

    return median(time_calls(all_reduce_buckets, flat.device, repeats, prepare=dist.barrier))


def compute_imbalance(values: Sequence[float]) -> float | None:
    """Return the fraction by which the maximum of the values exceeds their mean.

    Returns None if there is at most one value.
    """
    return max(values) / fmean(values) - 1 if len(values) > 1 else None


@dataclass(frozen=True)
class ScalingReport:
    """Report on step times, stragglers, communication and scaling efficiency of a data-parallel run."""

    ranks: Sequence[RankTimes]
    hosts: Sequence[str]
    """Host name of each rank, or of each device if one process uses several devices."""
    step_seconds: float
    """Duration of a step in seconds."""
    communication_seconds: float | None = None
    """Time in seconds that the communication of one step takes without computation; None if it was not measured."""
    single_rank_seconds: float = 0.0
    """Duration in seconds of the same step on a single rank; 0 if it was not measured."""

    @property
    def exposed_fraction(self) -> float | None:
        """The fraction of the communication that does not overlap with backward.

        In each step, the rank that waited for the shortest time is used, because the other ranks have also waited for
        slower ranks. The value is None if the communication was not measured.
        """
        # A rank that has joined the run later has fewer steps, so the steps are aligned at the newest step.
        newest_first = [rank.exposed[::-1] for rank in self.ranks]
        steps = list(zip(*newest_first, strict=False))
        if not steps or not self.communication_seconds or len(self.ranks) == 1:
            return None
        return min(1.0, median(min(step) for step in steps) / self.communication_seconds)

    @property
    def efficiency(self) -> float | None:
        """The scaling efficiency: 1.0 if p ranks are p times as fast as one.

        The value is None if the step time of a single rank was not measured.
        """
        return (
            self.single_rank_seconds / self.step_seconds / len(self.hosts)
            if self.single_rank_seconds and self.step_seconds
            else None
        )

    @property
    def straggler(self) -> int | None:
        """The rank that is clearly slower than the others before backward, or None."""
        slowest = self._find_straggler_times()
        return None if slowest is None else slowest.rank

    def _find_straggler_times(self) -> RankTimes | None:
        """Return the times of the straggler.

        Returns None if there is no straggler, or if a rank has measured fewer than MIN_STEPS steps.
        """
        if not self.ranks or min(rank.steps for rank in self.ranks) < MIN_STEPS:
            return None
        seconds = [rank.before_backward for rank in self.ranks]
        index = find_straggler(seconds, [rank.samples for rank in self.ranks])
        return None if index is None else self.ranks[index]

    def rows(self) -> dict[str, str]:
        """Return the rows that this report adds to the final table."""
        rows: dict[str, str] = {}
        if self.ranks:
            lines = [
                f"rank {rank.rank}: data {rank.data * 1e3:.2f}, before backward {rank.before_backward * 1e3:.2f}, "
                f"step {rank.step * 1e3:.2f}"
                for rank in self.ranks
            ]
            rows["ms per step"] = "\n".join(lines)

        slowest = self._find_straggler_times()
        if slowest is not None:
            median_of_others = median(rank.before_backward for rank in self.ranks if rank is not slowest)
            rows["straggler"] = (
                f"rank {slowest.rank} on {self.hosts[slowest.rank]}: {slowest.before_backward * 1e3:.2f} ms from "
                f"step start to backward (median of the other ranks: {median_of_others * 1e3:.2f} ms)"
            )

        exposed = self.exposed_fraction
        if exposed is not None and self.communication_seconds is not None:
            milliseconds = self.communication_seconds * 1e3
            rows["communication"] = f"{milliseconds:.2f} ms per step, {exposed:.0%} not overlapped with backward"

        if self.efficiency is not None:
            rows["efficiency"] = (
                f"{self.efficiency:.0%} of the ideal {len(self.hosts)}-fold speedup "
                f"(actual speedup {self.single_rank_seconds / self.step_seconds:.2f}; "
                f"one rank alone takes {self.single_rank_seconds * 1e3:.2f} ms per step)"
            )
        return rows

    def result(self) -> ReportData:
        """Return the values that this report adds to result.json. Times are in seconds."""
        ranks = []
        for rank in self.ranks:
            fields = asdict(rank)
            del fields["exposed"]
            ranks.append(fields)
        measured = {
            "ranks": ranks,
            "straggler": self.straggler,
            "communication_seconds": self.communication_seconds,
            "communication_exposed": self.exposed_fraction,
            "single_rank_step_seconds": self.single_rank_seconds or None,
            "efficiency": self.efficiency,
        }
        return ReportData(measured={name: value for name, value in measured.items() if value is not None})


def pop_total_waiting_seconds(model: nn.Module) -> float:
    """Return and reset the total seconds that layers have waited for other ranks.

    Layers that wait for other ranks in the forward pass, such as synchronized BatchNorm, have a
    method `pop_waiting_seconds`.
    """
    seconds = 0.0
    for module in model.modules():
        pop_waiting_seconds = getattr(module, "pop_waiting_seconds", None)
        if pop_waiting_seconds is not None:
            seconds += pop_waiting_seconds()
    return seconds
