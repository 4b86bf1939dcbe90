"""Shards for ranks that are unequally fast: what a step takes on each, and how to share a batch accordingly."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.data.loader import Loader
from common.distributed.rendezvous import World

WINDOW = 15  # steps after which the shards are looked at again
GAIN = 0.05  # part of a step's time that other shards must save: less is noise, and a change costs something, too


@dataclass(frozen=True)
class Speed:
    """Seconds that a rank needs for n samples, apart from waiting for the others: base + each * n."""

    base: float
    each: float

    @classmethod
    def fit(cls, few: int, many: int, seconds: Sequence[float]) -> Speed:
        """Put the line through what `few` and `many` samples took; through 0 where more took less."""
        each = (seconds[1] - seconds[0]) / (many - few)
        if each <= 0:
            return cls(0.0, seconds[1] / many)
        base = seconds[0] - each * few
        return cls(base, each) if base >= 0 else cls(0.0, seconds[1] / many)

    def predict(self, samples: int) -> float:
        """Return the seconds of a step with so many samples."""
        return self.base + self.each * samples

    def correct(self, samples: int, seconds: float) -> Speed:
        """Return the speed of a rank that has become slower or faster as a whole: `samples` now take `seconds`."""
        factor = seconds / self.predict(samples)
        return Speed(self.base * factor, self.each * factor)

    def __str__(self) -> str:
        return f"{self.base * 1e3:.3g} + {self.each * 1e3:.3g} n ms"


def predict_slowest(speeds: Sequence[Speed], counts: Sequence[int]) -> float:
    """Return the seconds of the rank that the others wait for."""
    return max(speed.predict(count) for speed, count in zip(speeds, counts, strict=True))


def choose_counts(speeds: Sequence[Speed], batch: int) -> tuple[int, ...]:
    """Return the samples of each rank with which the slowest one is done soonest; each gets one at least.

    One more sample goes to the rank that is done first with it. A rank without a sample would not be measured any more.
    """
    counts = [1] * len(speeds)
    nexts = [(speed.predict(2), rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(nexts)
    for _ in range(batch - len(speeds)):
        rank = nexts[0][1]
        counts[rank] += 1
        heapq.heapreplace(nexts, (speeds[rank].predict(counts[rank] + 1), rank))
    return tuple(counts)


class AutoShards:
    """Shards that follow the speed of the ranks. All ranks choose the same ones, from the same numbers."""

    def __init__(self, loader: Loader, world: World, own: Speed, say: Callable[[str], None]) -> None:
        """`own` is the speed of this rank, measured while the others were, too. All ranks call it."""
        self.loader, self.world, self.say = loader, world, say
        self.speeds = [Speed(*line) for line in world.all_gather([own.base, own.each])]
        self.history = [(1, loader.counts)]
        """The shards, and the first step of this attempt with them."""
        lines = ", ".join(f"rank {rank} {speed}" for rank, speed in enumerate(self.speeds))
        if not self._improve(1, f"n samples take {lines}"):
            self.say(f"shards=auto: equal ones, because n samples take {lines}")

    @property
    def own_samples(self) -> int:
        """Samples of this rank in a full batch, or microbatch."""
        return self.loader.own_samples

    def average_own_samples(self, first_step: int, last_step: int) -> float:
        """Return the mean samples of this rank over some steps of this attempt."""
        ends = [first for first, _ in self.history[1:]] + [last_step + 1]
        total, steps = 0, 0
        for (first, counts), end in zip(self.history, ends, strict=True):
            count = max(0, end - max(first, first_step))
            total += counts[self.world.rank] * count
            steps += count
        return total / steps if steps else float(self.own_samples)

    @property
    def values(self) -> dict[str, float]:
        """The samples of each rank, as values of metrics.jsonl."""
        return {f"shard_{rank}": float(count) for rank, count in enumerate(self.loader.counts)}

    def follow(self, step: int, seconds: float) -> bool:
        """Choose the shards from the step after `step` on; `seconds` is what this rank's steps took of late.

        All ranks call it, after steps that all had the present shards. Return True where they have changed.
        """
        found, counts = self.world.all_gather(seconds), self.loader.counts
        self.speeds = [
            speed.correct(count, took) for speed, count, took in zip(self.speeds, counts, found, strict=True)
        ]
        lines = ", ".join(f"rank {rank} {took * 1e3:.3g} ms" for rank, took in enumerate(found))
        return self._improve(step + 1, f"before the others are waited for, {lines}")

    def _improve(self, step: int, reason: str) -> bool:
        """Change the shards, and say so, if others make the slowest rank clearly faster."""
        best, counts = choose_counts(self.speeds, sum(self.loader.counts)), self.loader.counts
        now, then = (predict_slowest(self.speeds, some) for some in (counts, best))
        if then > (1 - GAIN) * now:
            return False
        self.loader.set_shards(self.world.rank, best)
        self.history = [*(known for known in self.history if known[0] < step), (step, best)]
        shown = f"[{','.join(map(str, best))}] from step {step} on"
        self.say(f"shards=auto: {shown}, because {reason}; the slowest then takes {then / now:.0%} of its time")
        return True
