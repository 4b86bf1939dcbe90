"""Timing of data-parallel steps: each rank's own numbers, stragglers, communication that is waited for.

The all-reduce makes all ranks' steps equally long, so the step time cannot name a slow one: the time until backward
begins can, as long as no rank has waited for another before.
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
from common.distributed.sync_batchnorm import take_waiting_seconds
from common.measure.device_clock import DeviceClock, Stamp
from common.measure.straggler import find_straggler
from common.measure.timing import time_calls
from common.runs.result import Facts

T = TypeVar("T")
HISTORY = 1000  # steps whose time stamps are kept
NEWEST = 50  # steps that tell how fast a rank is just now
WARM_UP = 10  # first steps, left out
ENOUGH = 10  # steps from which on a rank is called a straggler


@dataclass(frozen=True)
class RankTimes:
    """One rank's seconds of a step: waiting for data, all before backward, the whole step."""

    data: float
    before_backward: float
    step: float
    steps: int
    rank: int = 0
    exposed: Sequence[float] = ()
    """From the last gradient to the end of backward, step by step: communication that nothing hid."""
    samples: float | None = None
    """Samples of a batch, the mean over the steps, where the shards of the ranks are unequal."""


class Pace:
    """Durations of the steps of this attempt, by the host's clock; what comes between two steps is left out."""

    def __init__(self) -> None:
        self.durations: list[float] = []  # seconds
        self.mark: float | None = None

    def note_step_end(self, now: float) -> None:
        """Note the end of a step; `now` by time.perf_counter()."""
        if self.mark is not None:
            self.durations.append(now - self.mark)
        self.mark = now

    def interrupt(self) -> None:
        """Leave out the time since the last step, which was no training."""
        self.mark = time.perf_counter()

    def is_steady_next(self, left: int) -> bool:
        """Return whether the steady steps begin with the next one, where `left` steps are to come after it."""
        done = len(self.durations) + (self.mark is not None)
        return done == min(WARM_UP, (done + left) // 3)

    def list_steady(self) -> list[float]:
        """Return the seconds of all steps but the first: WARM_UP are left out, of a short run a third."""
        return self.durations[min(WARM_UP, len(self.durations) // 3) :]

    def compute_mean(self) -> float:
        """Return the mean of the steady steps in seconds; 0 before there is one."""
        return fmean(self.list_steady() or [0.0])


class MarkedStep(NamedTuple):
    """The time stamps of a step."""

    marks: dict[str, Stamp]
    computing: list[tuple[Stamp, Stamp]]
    """Start and end of each sharded layer's forward."""
    waited: float
    """Seconds that synchronised BatchNorm waited for other ranks in the forward."""


class StepTimes:
    """Time stamps of one rank's steps."""

    def __init__(self, model: nn.Module, device: torch.device, sharded: Iterable[nn.Module] = ()) -> None:
        """`sharded` are layers that wait for their parameters in the forward: only what they compute then counts."""
        self.model, self.clock = model, DeviceClock(device)
        self.computing: list[tuple[Stamp, Stamp]] = []
        self.began: list[Stamp] = []
        for layer in sharded:  # after fully_shard has put its own hooks around the layer
            layer.register_forward_pre_hook(lambda *_: self.began.append(self.clock.stamp()))
            layer.register_forward_hook(self._record_forward, prepend=True)
        self.history: deque[MarkedStep] = deque(maxlen=HISTORY)
        self.marks: dict[str, Stamp] = {}
        self.skip = WARM_UP
        # backward reaches the first layer last
        next(model.parameters()).register_hook(lambda _: self.mark("last gradient"))

    def _record_forward(self, *_: object) -> None:
        self.computing.append((self.began.pop(), self.clock.stamp()))

    def mark(self, name: str) -> None:
        """Note the time under a name: "backward" where backward begins, "end of backward" behind it."""
        self.marks[name] = self.clock.stamp()

    def iterate(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the loader's batches; a step lasts from asking for one to asking for the next."""
        source = iter(loader)
        while True:
            self.clock.begin_step()
            self.marks, self.computing, self.began = {"start": self.clock.stamp()}, [], []
            batch = next(source, None)
            if batch is None:
                return
            self.mark("data")
            yield batch
            self.mark("end")
            self._keep_step()

    def _keep_step(self) -> None:
        waited = take_waiting_seconds(self.model)
        if "backward" not in self.marks:  # the experiment does not mark it
            return
        if self.skip:
            self.skip -= 1
        else:
            self.history.append(MarkedStep(self.marks, self.computing, waited))

    def _measure(self, step: MarkedStep) -> dict[str, float]:
        """Return the seconds of a step by name; its forward is without the time in which it waited for other ranks."""
        seconds = self.clock.to_seconds
        at = {name: seconds(stamp) for name, stamp in step.marks.items()}
        forward = at["backward"] - at["data"] - step.waited
        if step.computing:
            forward = sum(seconds(end) - seconds(start) for start, end in step.computing)
        found = {"data": at["data"] - at["start"], "forward": forward, "step": at["end"] - at["start"]}
        if "last gradient" in at and "end of backward" in at:
            found["exposed"] = at["end of backward"] - at["last gradient"]
        if "last gradient" in at:
            found["own"] = at["last gradient"] - at["start"]
        return found

    def measure_own_seconds(self, steps: int) -> float | None:
        """Return the seconds from the start of a step to its last gradient, the median of the newest `steps`.

        Until then no rank waits for another, but for norms that are synchronised. Waits for a GPU to come so far. None
        before there are as many steps.
        """
        newest = [self._measure(step) for step in list(self.history)[-steps:]]
        return median(step["own"] for step in newest) if len(newest) == steps else None

    def estimate_seconds_to_backward(self) -> float | None:
        """Return the seconds until backward begins, the median of the newest steps; None before there are enough.

        On a GPU the newest steps that it has come to the end of: asking for others would wait for it.
        """
        done = [step for step in self.history if self.clock.has_reached(step.marks["end"])][-NEWEST:]
        if len(done) < ENOUGH:
            return None
        return median(step["data"] + step["forward"] for step in map(self._measure, done))

    def summarize(self) -> RankTimes | None:
        """Return the numbers of all kept steps; None before there is one."""
        if not self.history:
            return None
        steps = [self._measure(step) for step in self.history]
        data = fmean(step["data"] for step in steps)  # no median: the loader works for several steps at once
        return RankTimes(
            data=data,
            before_backward=data + median(step["forward"] for step in steps),
            step=fmean(step["step"] for step in steps),
            steps=len(steps),
            exposed=[step["exposed"] for step in steps if "exposed" in step],
        )


def gather_step_times(world: World, times: StepTimes | None, samples: float | None = None) -> list[RankTimes]:
    """Return the numbers of all ranks that have some, on rank 0; `samples` are this rank's, where shards are unequal.

    All ranks call it.
    """
    own = times.summarize() if times else None
    given = enumerate(world.gather(asdict(own) | {"samples": samples} if own else None))
    return [RankTimes(**(found | {"rank": rank})) for rank, found in given if found]


def time_communication(model: nn.Module, bucket_mb: float, size: int, repeats: int = 5) -> float | None:
    """Return the seconds to all-reduce what one step sends, with nothing beside it; None with one rank.

    All ranks call it. Gradients travel in buckets of `bucket_mb` MB, as numbers of `size` bytes.
    """
    if dist.get_world_size() == 1:
        return None
    parameters = list(model.parameters())
    dtype = {2: torch.float16, 4: torch.float32, 8: torch.float64}[size]
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype, device=parameters[0].device)
    buckets = flat.split(max(1, int(bucket_mb * 2**20) // size))

    def reduce_all() -> None:
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            assert work is not None
            work.wait()

    return median(time_calls(reduce_all, flat.device, repeats, prepare=dist.barrier))


def compute_imbalance(values: Sequence[float]) -> float | None:
    """Return by which fraction the largest exceeds the mean, 0 when all are equal; None where there is only one."""
    return max(values) / fmean(values) - 1 if len(values) > 1 else None


@dataclass(frozen=True)
class ScalingReport:
    """The report on how the ranks of a data-parallel run worked together."""

    ranks: Sequence[RankTimes]
    hosts: Sequence[str]
    step: float
    """Seconds of a step."""
    communication: float | None = None
    """Seconds of one step's communication with nothing beside it."""
    alone: float = 0.0
    """Seconds of the same step by one rank; 0 where it was not measured."""

    @property
    def exposed_fraction(self) -> float | None:
        """The fraction of the communication that is not hidden behind backward.

        In each step the rank that waits least counts: the others wait for it too, not only for messages.
        """
        newest = [rank.exposed[::-1] for rank in self.ranks]  # a rank that joined an elastic run has fewer
        steps = list(zip(*newest, strict=False))
        if not steps or not self.communication or len(self.ranks) == 1:
            return None
        return min(1.0, median(min(step) for step in steps) / self.communication)

    @property
    def efficiency(self) -> float | None:
        """The scaling efficiency: 1 when p ranks are p times as fast as one."""
        return self.alone / self.step / len(self.hosts) if self.alone and self.step else None

    @property
    def straggler(self) -> int | None:
        """The rank that the others wait for, if one is clearly slower before backward."""
        if not self.ranks or min(rank.steps for rank in self.ranks) < ENOUGH:
            return None
        found = find_straggler([rank.before_backward for rank in self.ranks], [rank.samples for rank in self.ranks])
        return None if found is None else self.ranks[found].rank

    def rows(self) -> dict[str, str]:
        """Return the rows of the final table."""
        rows: dict[str, str] = {}
        if self.ranks:
            each = [
                f"rank {rank.rank}: data {rank.data * 1e3:.2f}, before backward {rank.before_backward * 1e3:.2f}, "
                f"step {rank.step * 1e3:.2f}"
                for rank in self.ranks
            ]
            rows["ms per step"] = "\n".join(each)
        if self.straggler is not None:
            slow, host = next(one for one in self.ranks if one.rank == self.straggler), self.hosts[self.straggler]
            others = median(rank.before_backward for rank in self.ranks if rank is not slow)
            rows["straggler"] = (
                f"rank {self.straggler} on {host}: {slow.before_backward * 1e3:.2f} ms until backward, "
                f"the others {others * 1e3:.2f} ms"
            )
        if self.exposed_fraction is not None and self.communication is not None:
            rows["communication"] = f"{self.communication * 1e3:.2f} ms a step, {self.exposed_fraction:.0%} not hidden"
        if self.efficiency is not None:
            rows["efficiency"] = (
                f"{self.efficiency:.0%} of {len(self.hosts)} times one rank "
                f"(alone {self.alone * 1e3:.2f} ms a step, speed-up {self.alone / self.step:.2f})"
            )
        return rows

    def result(self) -> Facts:
        """Return the values for result.json, all measured; times in seconds."""
        found = {
            "ranks": [{k: v for k, v in asdict(rank).items() if k != "exposed"} for rank in self.ranks],
            "straggler": self.straggler,
            "communication_seconds": self.communication,
            "communication_exposed": self.exposed_fraction,
            "single_rank_step_seconds": self.alone or None,
            "efficiency": self.efficiency,
        }
        return Facts(measured={name: value for name, value in found.items() if value is not None})
