"""Where the time of data-parallel steps goes: each process's own numbers, stragglers, communication that is waited for.

The all-reduce makes all processes' steps equally long, so the step time cannot name a slow one: the time
until backward begins can, as long as nothing is exchanged before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from common.distributed.rendezvous import World
from common.distributed.sync_batchnorm import take_waiting_seconds
from common.measure.device_clock import DeviceClock, Stamp
from common.measure.straggler import find_straggler
from common.measure.timing import time_calls
from common.runs.result import Added

T = TypeVar("T")
HISTORY = 1000  # steps whose time stamps are kept
NEWEST = 50  # steps that tell how a process does just now
WARM_UP = 10  # first steps, left out
ENOUGH = 10  # steps from which on somebody is called one


@dataclass(frozen=True)
class Rank:
    """One process's seconds of a step: waiting for data, all before backward, the whole step."""

    data: float
    before_backward: float
    step: float
    steps: int
    exposed: tuple[float, ...] = ()
    """From the last gradient to the end of backward, step by step: communication that nothing hid."""


class Pace:
    """Durations of the steps of this attempt, by the host's clock; what comes between two steps is left out."""

    def __init__(self) -> None:
        self.durations: list[float] = []  # seconds
        self.mark: float | None = None

    def step(self, now: float) -> None:
        """A step has ended; `now` by time.perf_counter()."""
        if self.mark is not None:
            self.durations.append(now - self.mark)
        self.mark = now

    def interrupt(self) -> None:
        """The time since the last step was no training."""
        self.mark = time.perf_counter()

    def steady_begins(self, left: int) -> bool:
        """Whether the steady steps begin with the next one, where `left` steps are to come after it."""
        done = len(self.durations) + (self.mark is not None)
        return done == min(WARM_UP, (done + left) // 3)

    def steady(self) -> list[float]:
        """Seconds of the newest steps, the first ones left out: WARM_UP, of a short run a third."""
        return self.durations[min(WARM_UP, len(self.durations) // 3) :]

    def mean(self) -> float:
        """The mean of the steady steps in seconds; 0 before there is one."""
        steady = self.steady()
        return sum(steady) / len(steady) if steady else 0.0


class StepTimes:
    """Time stamps of one process's steps."""

    def __init__(self, model: nn.Module, device: torch.device, sharded: Iterable[nn.Module] = ()) -> None:
        """`sharded` are layers that wait for their parameters in the forward: only what they compute then counts."""
        self.model, self.clock = model, DeviceClock(device)
        self.computing: list[tuple[Stamp, Stamp]] = []
        self.began: list[Stamp] = []
        for layer in sharded:  # after fully_shard has put its own hooks around the layer
            layer.register_forward_pre_hook(lambda *_: self.began.append(self.clock.stamp()))
            layer.register_forward_hook(self._computed, prepend=True)
        self.history: deque[tuple[dict[str, Stamp], list[tuple[Stamp, Stamp]]]] = deque(maxlen=HISTORY)
        self.marks: dict[str, Stamp] = {}
        self.skip = WARM_UP
        # backward reaches the first layer last
        next(model.parameters()).register_hook(lambda _: self.mark("last gradient"))

    def _computed(self, *_: object) -> None:
        self.computing.append((self.began.pop(), self.clock.stamp()))

    def mark(self, name: str) -> None:
        self.marks[name] = self.clock.stamp()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The loader's batches; a step lasts from asking for one to asking for the next."""
        source = iter(loader)
        while True:
            self.clock.begin()
            self.marks, self.computing, self.began = {"start": self.clock.stamp()}, [], []
            batch = next(source, None)
            if batch is None:
                return
            self.mark("data")
            yield batch
            self.mark("end")
            self._keep()

    def _keep(self) -> None:
        self.marks["in norms"] = take_waiting_seconds(self.model)
        if "backward" not in self.marks:  # nobody says where it begins
            return
        if self.skip:
            self.skip -= 1
        else:
            self.history.append((self.marks, self.computing))

    def _forward(self, marks: dict[str, float], computing: list[tuple[Stamp, Stamp]]) -> float:
        """Seconds that a step's forward computed, without what it waited for others."""
        at = self.clock.seconds
        if computing:
            return sum(at(end) - at(start) for start, end in computing)
        return marks["backward"] - marks["data"] - marks["in norms"]

    def recent(self) -> float | None:
        """Seconds of the newest steps until backward begins, the median; None before there are enough of them.

        On a GPU the newest steps that it has come to the end of: asking for others would wait for it.
        """
        done = [step for step in self.history if self.clock.reached(step[0]["end"])][-NEWEST:]
        if len(done) < ENOUGH:
            return None
        steps = [(self._seconds(marks), computing) for marks, computing in done]
        return median(marks["data"] - marks["start"] + self._forward(marks, computing) for marks, computing in steps)

    def _seconds(self, marks: dict[str, Stamp]) -> dict[str, float]:
        return {name: self.clock.seconds(stamp) for name, stamp in marks.items()}

    def summary(self) -> Rank | None:
        """None before there is a steady step."""
        if not self.history:
            return None
        steps = [self._seconds(marks) for marks, _ in self.history]
        data = mean(s["data"] - s["start"] for s in steps)  # no median: the loader works for several steps at once
        computing = (computing for _, computing in self.history)
        forward = median(self._forward(marks, own) for marks, own in zip(steps, computing, strict=True))
        exposed = [s["end of backward"] - s["last gradient"] for s in steps if "last gradient" in s]
        return Rank(
            data=data,
            before_backward=data + forward,
            step=mean(s["end"] - s["start"] for s in steps),
            steps=len(steps),
            exposed=tuple(exposed),
        )


def straggler(ranks: Sequence[Rank]) -> int | None:
    """The process that the others wait for, if one is clearly slower before backward."""
    if min(rank.steps for rank in ranks) < ENOUGH:
        return None
    return find_straggler([rank.before_backward for rank in ranks])


def time_communication(model: nn.Module, bucket_mb: float, size: int, repeats: int = 5) -> float | None:
    """Seconds to all-reduce what one step sends, with nothing beside it; None with one rank. All ranks call it.

    Gradients travel in buckets of so many MB, as numbers of `size` bytes.
    """
    if dist.get_world_size() == 1:
        return None
    parameters = list(model.parameters())
    dtype = {2: torch.float16, 4: torch.float32, 8: torch.float64}[size]
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype, device=parameters[0].device)
    pieces = flat.split(max(1, int(bucket_mb * 2**20) // size))

    def reduce_all() -> None:
        for work in [dist.all_reduce(piece, async_op=True) for piece in pieces]:
            assert work is not None
            work.wait()

    return median(time_calls(reduce_all, flat.device, repeats, prepare=dist.barrier))


def imbalance(values: Sequence[float]) -> float | None:
    """How much more the largest is than the mean, 0 when all are equal; None where there is only one."""
    return max(values) / mean(values) - 1 if len(values) > 1 else None


@dataclass(frozen=True)
class ScalingReport:
    """What the processes of a data-parallel run did, out of the numbers of all of them."""

    ranks: Sequence[Rank]
    hosts: Sequence[str]
    communication: float | None
    """Seconds of one step's communication with nothing beside it."""
    alone: float
    """Seconds of the same step in one process; 0 where it was not measured."""
    step: float
    """Seconds of a step."""

    @classmethod
    def of(
        cls,
        world: World,
        times: StepTimes | None,
        step: float,
        *,
        communication: float | None = None,
        alone: float = 0.0,
    ) -> ScalingReport:
        """From the time stamps of all ranks, which call it together."""
        ranks = world.gather(times.summary() if times else None)
        return cls([rank for rank in ranks if rank], world.hosts, communication, alone, step)

    @property
    def exposed(self) -> float | None:
        """The share of the communication that is not hidden behind backward.

        In each step the process that waits least counts: the others wait for it too, not only for messages.
        """
        steps = list(zip(*(rank.exposed for rank in self.ranks), strict=True))
        if not steps or not self.communication or len(self.ranks) == 1:
            return None
        return min(1.0, median(min(step) for step in steps) / self.communication)

    @property
    def efficiency(self) -> float | None:
        """1 when p processes are p times as fast as one."""
        return self.alone / self.step / len(self.hosts) if self.alone and self.step else None

    @property
    def straggler(self) -> int | None:
        return straggler(self.ranks) if self.ranks else None

    def rows(self) -> dict[str, str]:
        """For the table."""
        rows: dict[str, str] = {}
        if self.ranks:
            each = [
                f"rank {r}: data {rank.data * 1e3:.2f}, before backward {rank.before_backward * 1e3:.2f}, "
                f"step {rank.step * 1e3:.2f}"
                for r, rank in enumerate(self.ranks)
            ]
            rows["ms per step"] = "\n".join(each)
        if self.straggler is not None:
            slow, host = self.ranks[self.straggler], self.hosts[self.straggler]
            others = median(rank.before_backward for rank in self.ranks if rank is not slow)
            rows["straggler"] = (
                f"rank {self.straggler} on {host}: {slow.before_backward * 1e3:.2f} ms until backward, "
                f"the others {others * 1e3:.2f} ms"
            )
        if self.exposed is not None and self.communication is not None:
            rows["communication"] = f"{self.communication * 1e3:.2f} ms a step, {self.exposed:.0%} not hidden"
        if self.efficiency is not None:
            rows["efficiency"] = (
                f"{self.efficiency:.0%} of {len(self.hosts)} times one process "
                f"(alone {self.alone * 1e3:.2f} ms a step, speed-up {self.alone / self.step:.2f})"
            )
        return rows

    def result(self) -> Added:
        """For result.json, what was measured; times in seconds."""
        found = {
            "ranks": [{k: v for k, v in asdict(rank).items() if k != "exposed"} for rank in self.ranks],
            "straggler": self.straggler,
            "communication_seconds": self.communication,
            "communication_exposed": self.exposed,
            "single_rank_step_seconds": self.alone or None,
            "efficiency": self.efficiency,
        }
        return Added(measured={name: value for name, value in found.items() if value is not None})
