"""Timing of data-parallel steps: the times of each rank, stragglers, communication that is not hidden.

The all-reduce makes the steps of all ranks equally long, so the step time cannot identify a slow rank. The time until
backward begins can, as long as no rank has waited for another before.
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
from torch import nn

from common.distributed.rendezvous import World
from common.distributed.sync_batchnorm import pop_waiting_seconds
from common.measure.device_clock import DeviceClock, Stamp
from common.measure.straggler import find_straggler
from common.measure.timing import time_calls
from common.runs.result import ReportData

T = TypeVar("T")
HISTORY = 1000
"""Number of newest steps whose time stamps are stored."""
NEWEST_STEPS = 50
"""Number of steps that show the current speed of a rank."""
WARM_UP = 10
"""Number of first steps that are left out."""
MIN_STEPS = 10
"""Number of steps below which no rank is called a straggler."""


@dataclass(frozen=True)
class RankTimes:
    """Mean or median seconds of one rank per step: waiting for data, everything before backward, the whole step."""

    data: float
    before_backward: float
    step: float
    steps: int
    """Number of steps measured."""
    rank: int = 0
    exposed: Sequence[float] = ()
    """Time from the last gradient to the end of backward, by step: communication that is not hidden."""
    samples: float | None = None
    """Mean samples per batch, if the shards of the ranks are unequal."""


class StepDurations:
    """Durations of the steps of this attempt, by the host's clock, without the time between two steps."""

    def __init__(self) -> None:
        self.durations: list[float] = []  # seconds
        self.mark: float | None = None

    def note_step_end(self, now: float) -> None:
        """Note the end of a step; `now` by time.perf_counter()."""
        if self.mark is not None:
            self.durations.append(now - self.mark)
        self.mark = now

    def interrupt(self) -> None:
        """Leave out the time since the last step, which was not training."""
        self.mark = time.perf_counter()

    def is_steady_next(self, left: int) -> bool:
        """Return whether the steady steps begin with the next one, after which `left` steps remain."""
        done = len(self.durations) + (self.mark is not None)
        return done == min(WARM_UP, (done + left) // 3)

    def list_steady(self) -> list[float]:
        """Return the seconds of all steps except the first WARM_UP (of a short run a third)."""
        return self.durations[min(WARM_UP, len(self.durations) // 3) :]

    def compute_mean(self) -> float:
        """Return the mean of the steady steps in seconds; 0 if there are none."""
        return fmean(self.list_steady() or [0.0])


class MarkedStep(NamedTuple):
    """The time stamps of a step."""

    marks: dict[str, Stamp]
    layer_spans: list[tuple[Stamp, Stamp]]
    """Start and end of each sharded layer's forward."""
    waited: float
    """Seconds that synchronised BatchNorm waited for other ranks in the forward."""


class StepTimes:
    """Time stamps of one rank's steps."""

    def __init__(self, model: nn.Module, device: torch.device, sharded: Iterable[nn.Module] = ()) -> None:
        """`sharded` are layers that wait for their parameters in the forward, of which only the computation counts."""
        self.model = model
        self.clock = DeviceClock(device)
        self.layer_starts: list[Stamp] = []
        self.layer_spans: list[tuple[Stamp, Stamp]] = []
        for layer in sharded:  # after fully_shard has installed its own hooks
            layer.register_forward_pre_hook(lambda *_: self.layer_starts.append(self.clock.stamp()))
            layer.register_forward_hook(self._record_forward, prepend=True)
        self.history: deque[MarkedStep] = deque(maxlen=HISTORY)
        self.marks: dict[str, Stamp] = {}
        self.steps_to_skip = WARM_UP
        # backward reaches the first layer last
        next(model.parameters()).register_hook(lambda _: self.mark("last gradient"))

    def _record_forward(self, *_: object) -> None:
        self.layer_spans.append((self.layer_starts.pop(), self.clock.stamp()))

    def mark(self, name: str) -> None:
        """Record the time under a name: "backward" before it begins, "end of backward" after it."""
        self.marks[name] = self.clock.stamp()

    def iterate(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the loader's batches; a step lasts from the request of a batch to the next request."""
        source = iter(loader)
        while True:
            self.clock.begin_step()
            self.marks = {"start": self.clock.stamp()}
            self.layer_starts = []
            self.layer_spans = []
            batch = next(source, None)
            if batch is None:
                return
            self.mark("data")
            yield batch
            self.mark("end")
            self._store_step()

    def _store_step(self) -> None:
        waited = pop_waiting_seconds(self.model)
        if "backward" not in self.marks:  # the experiment does not mark it
            return
        if self.steps_to_skip:
            self.steps_to_skip -= 1
        else:
            self.history.append(MarkedStep(self.marks, self.layer_spans, waited))

    def _measure_step(self, step: MarkedStep) -> dict[str, float]:
        """Return the seconds of a step by name; its forward excludes waiting for other ranks."""
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
        """Return the median seconds from start to last gradient of the newest `steps`.

        Until then no rank waits for another, except in synchronised norms. Waits for a GPU to finish these steps. None
        if there are fewer steps.
        """
        newest = [self._measure_step(step) for step in list(self.history)[-steps:]]
        return median(step["to last gradient"] for step in newest) if len(newest) == steps else None

    def estimate_seconds_to_backward(self) -> float | None:
        """Return the median seconds until backward begins; None if there are too few steps.

        On a GPU only steps that it has finished count, because reading others would wait for it.
        """
        finished = [step for step in self.history if self.clock.has_reached(step.marks["end"])]
        if len(finished) < MIN_STEPS:
            return None
        newest = [self._measure_step(step) for step in finished[-NEWEST_STEPS:]]
        return median(step["data"] + step["forward"] for step in newest)

    def summarize(self) -> RankTimes | None:
        """Return the times over all stored steps; None if there are none."""
        if not self.history:
            return None
        steps = [self._measure_step(step) for step in self.history]
        data = fmean(step["data"] for step in steps)  # no median: the loader works for several steps at a time
        forward = median(step["forward"] for step in steps)
        duration = fmean(step["step"] for step in steps)
        exposed = [step["exposed"] for step in steps if "exposed" in step]
        return RankTimes(data, data + forward, duration, len(steps), exposed=exposed)


def gather_step_times(world: World, times: StepTimes | None, samples: float | None = None) -> list[RankTimes]:
    """On rank 0, return the step times of all ranks that recorded any. All ranks call it.

    `samples` is the mean number of this rank's samples per batch, if shards are unequal.
    """
    summary = times.summarize() if times else None
    gathered = world.gather(asdict(summary) | {"samples": samples} if summary else None)
    return [RankTimes(**fields | {"rank": rank}) for rank, fields in enumerate(gathered) if fields]


def time_communication(model: nn.Module, bucket_mb: float, size: int, repeats: int = 5) -> float | None:
    """Return the seconds to all-reduce the gradients of a step, without computation; None with one rank.

    All ranks call it. Gradients are sent in buckets of `bucket_mb` MB, as numbers of `size` bytes.
    """
    if dist.get_world_size() == 1:
        return None
    parameters = list(model.parameters())
    dtype = {2: torch.float16, 4: torch.float32, 8: torch.float64}[size]
    count = sum(parameter.numel() for parameter in parameters)
    flat = torch.zeros(count, dtype=dtype, device=parameters[0].device)
    buckets = flat.split(max(1, int(bucket_mb * 2**20) // size))

    def reduce_all() -> None:
        works = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
        for work in works:
            assert work is not None
            work.wait()

    return median(time_calls(reduce_all, flat.device, repeats, prepare=dist.barrier))


def compute_imbalance(values: Sequence[float]) -> float | None:
    """Return the fraction by which the maximum exceeds the mean; None for a single value."""
    return max(values) / fmean(values) - 1 if len(values) > 1 else None


@dataclass(frozen=True)
class ScalingReport:
    """The report on the cooperation of the ranks of a data-parallel run."""

    ranks: Sequence[RankTimes]
    hosts: Sequence[str]
    step_seconds: float
    """Seconds of a step."""
    communication_seconds: float | None = None
    """Seconds of one step's communication without computation."""
    single_rank_seconds: float = 0.0
    """Seconds of the same step on one rank; 0 if it was not measured."""

    @property
    def exposed_fraction(self) -> float | None:
        """The fraction of the communication that is not hidden behind backward.

        In each step the rank with the shortest wait counts: the others also wait for that rank.
        """
        newest_first = [rank.exposed[::-1] for rank in self.ranks]  # a rank that joined later has fewer steps
        steps = list(zip(*newest_first, strict=False))
        if not steps or not self.communication_seconds or len(self.ranks) == 1:
            return None
        return min(1.0, median(min(step) for step in steps) / self.communication_seconds)

    @property
    def efficiency(self) -> float | None:
        """The scaling efficiency: 1 when p ranks are p times as fast as one."""
        return (
            self.single_rank_seconds / self.step_seconds / len(self.hosts)
            if self.single_rank_seconds and self.step_seconds
            else None
        )

    @property
    def straggler(self) -> int | None:
        """The rank for which the others wait, if it is clearly slower before backward."""
        slowest = self._find_straggler_times()
        return None if slowest is None else slowest.rank

    def _find_straggler_times(self) -> RankTimes | None:
        if not self.ranks or min(rank.steps for rank in self.ranks) < MIN_STEPS:
            return None
        seconds = [rank.before_backward for rank in self.ranks]
        index = find_straggler(seconds, [rank.samples for rank in self.ranks])
        return None if index is None else self.ranks[index]

    def rows(self) -> dict[str, str]:
        """Return the rows of the final table."""
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
                f"rank {slowest.rank} on {self.hosts[slowest.rank]}: {slowest.before_backward * 1e3:.2f} ms until "
                f"backward, the others {median_of_others * 1e3:.2f} ms"
            )
        exposed = self.exposed_fraction
        if exposed is not None and self.communication_seconds is not None:
            rows["communication"] = f"{self.communication_seconds * 1e3:.2f} ms a step, {exposed:.0%} not hidden"
        if self.efficiency is not None:
            rows["efficiency"] = (
                f"{self.efficiency:.0%} of {len(self.hosts)} times one rank "
                f"(alone {self.single_rank_seconds * 1e3:.2f} ms a step, "
                f"speed-up {self.single_rank_seconds / self.step_seconds:.2f})"
            )
        return rows

    def result(self) -> ReportData:
        """Return the values for result.json, all measured; times in seconds."""
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
