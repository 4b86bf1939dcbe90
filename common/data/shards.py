"""Shards for ranks of unequal speed: a model of each rank's step time, and the division of a batch that follows."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.data.loader import Loader
from common.distributed.rendezvous import World

WINDOW = 15  # steps between two updates of the shards
GAIN = 0.05  # share of the step time that new shards must save: a smaller gain is noise and not worth the change


@dataclass(frozen=True)
class Speed:
    """Linear model of a rank's step time without waiting: base + per_sample * n seconds for n samples."""

    base: float
    per_sample: float

    @classmethod
    def fit(cls, small: int, large: int, seconds: Sequence[float]) -> Speed:
        """Fit the line to the times of `small` and `large` samples; through the origin if it would be negative."""
        slope = (seconds[1] - seconds[0]) / (large - small)
        base = seconds[0] - slope * small
        if slope > 0 and base >= 0:
            return cls(base, slope)
        return cls(0.0, seconds[1] / large)

    def predict(self, samples: int) -> float:
        """Return the seconds of a step with `samples` samples."""
        return self.base + self.per_sample * samples

    def correct(self, samples: int, seconds: float) -> Speed:
        """Scale the line so that `samples` samples take `seconds`."""
        factor = seconds / self.predict(samples)
        return Speed(self.base * factor, self.per_sample * factor)

    def __str__(self) -> str:
        return f"{self.base * 1e3:.3g} + {self.per_sample * 1e3:.3g} n ms"


def predict_slowest(speeds: Sequence[Speed], counts: Sequence[int]) -> float:
    """Return the seconds of a step on the slowest rank."""
    return max(speed.predict(count) for speed, count in zip(speeds, counts, strict=True))


def choose_counts(speeds: Sequence[Speed], batch: int) -> tuple[int, ...]:
    """Return the samples of each rank that minimise the time of the slowest one, at least one sample per rank.

    Each further sample goes to the rank that would finish first with it. A rank without a sample could not be measured.
    """
    counts = [1] * len(speeds)
    heap = [(speed.predict(2), rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(heap)
    for _ in range(batch - len(speeds)):
        rank = heap[0][1]
        counts[rank] += 1
        heapq.heapreplace(heap, (speeds[rank].predict(counts[rank] + 1), rank))
    return tuple(counts)


class AutoShards:
    """Shards that follow the speed of the ranks. All ranks choose the same shards from the same measurements."""

    def __init__(self, loader: Loader, world: World, speed: Speed, log_message: Callable[[str], None]) -> None:
        """Choose the first shards. All ranks call it.

        `speed` is the speed of this rank, measured while all ranks computed.
        """
        self.loader = loader
        self.world = world
        self.log_message = log_message
        lines = world.all_gather([speed.base, speed.per_sample])
        self.speeds = [Speed(*line) for line in lines]
        self.history = [(1, loader.counts)]
        """Pairs of shards and the first step of this attempt with them."""
        measured = ", ".join(f"rank {rank} {speed}" for rank, speed in enumerate(self.speeds))
        if not self._improve(1, f"n samples take {measured}"):
            self.log_message(f"shards=auto: equal shards, because n samples take {measured}")

    @property
    def local_samples(self) -> int:
        """Samples of this rank in a full batch, or microbatch."""
        return self.loader.local_samples

    def average_local_samples(self, first_step: int, last_step: int) -> float:
        """Return the mean samples of this rank over a range of steps of this attempt."""
        ends = [first for first, _ in self.history[1:]] + [last_step + 1]
        samples = 0
        steps = 0
        for (first, counts), end in zip(self.history, ends, strict=True):
            overlap = max(0, end - max(first, first_step))
            samples += counts[self.world.rank] * overlap
            steps += overlap
        return samples / steps if steps else float(self.local_samples)

    @property
    def metric_values(self) -> dict[str, float]:
        """The samples of each rank, as values of metrics.jsonl."""
        return {f"shard_{rank}": float(count) for rank, count in enumerate(self.loader.counts)}

    def update(self, step: int, seconds: float) -> bool:
        """Choose the shards for the steps after `step`; return True if they have changed.

        `seconds` is the duration of this rank's latest steps without waiting, all with the current shards. All ranks
        call it.
        """
        durations = self.world.all_gather(seconds)
        counts = self.loader.counts
        for rank, duration in enumerate(durations):
            self.speeds[rank] = self.speeds[rank].correct(counts[rank], duration)
        measured = ", ".join(f"rank {rank} {duration * 1e3:.3g} ms" for rank, duration in enumerate(durations))
        return self._improve(step + 1, f"a step takes, without waiting, {measured}")

    def _improve(self, step: int, reason: str) -> bool:
        """Change and report the shards if others make the slowest rank clearly faster."""
        counts = choose_counts(self.speeds, sum(self.loader.counts))
        current_seconds = predict_slowest(self.speeds, self.loader.counts)
        seconds = predict_slowest(self.speeds, counts)
        if seconds > (1 - GAIN) * current_seconds:
            return False
        self.loader.set_shards(self.world.rank, counts)
        self.history = [change for change in self.history if change[0] < step]
        self.history.append((step, counts))
        self.log_message(
            f"shards=auto: [{','.join(map(str, counts))}] from step {step} on, because {reason}; "
            f"the slowest rank then takes {seconds / current_seconds:.0%} of its time"
        )
        return True
