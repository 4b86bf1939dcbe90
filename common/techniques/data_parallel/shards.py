"""Division of a batch among ranks of unequal speed, based on a model of each rank's step time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.data.loader import Loader
from common.ranks.rendezvous import World

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


class AutoShards:
    """Shard sizes that adapt to the speeds of the ranks (shards=auto).

    All ranks use the same measurements and therefore choose the same shards.
    """

    def __init__(self, loader: Loader, world: World, speed: StepTimeModel, log_message: Callable[[str], None]) -> None:
        """Choose the first shards. All ranks must create this object at the same step.

        `speed` is the step time model of this rank, measured while all ranks were computing.
        """
        self.loader = loader
        self.world = world
        self.log_message = log_message
        lines = world.all_gather([speed.base, speed.per_sample])
        self.speeds = [StepTimeModel(*line) for line in lines]
        self.history = [(1, loader.counts)]
        """Pairs (first step, number of samples of each rank), one for each set of shards used in this attempt."""
        measured = ", ".join(f"{speed} on rank {rank}" for rank, speed in enumerate(self.speeds))
        if not self._change_shards_if_faster(1, f"a step with n samples takes {measured}"):
            self.log_message(f"shards=auto: using equal shards, because a step with n samples takes {measured}")

    @property
    def local_samples(self) -> int:
        """Number of samples of this rank in a full batch or microbatch."""
        return self.loader.local_samples

    def average_local_samples(self, first_step: int, last_step: int) -> float:
        """Return the mean number of samples of this rank per batch over a range of steps.

        Both `first_step` and `last_step` are included, and must belong to this attempt.
        """
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
        """Number of samples of each rank in a full batch, as values for metrics.jsonl."""
        return {f"shard_{rank}": float(count) for rank, count in enumerate(self.loader.counts)}

    def update_shards(self, step: int, seconds: float) -> bool:
        """Choose the shards for the steps after `step`; return True if they have changed.

        `seconds` is the typical duration of this rank's latest steps, without the time spent waiting for other ranks.
        All of these steps must have used the current shards. All ranks must call this method.
        """
        durations = self.world.all_gather(seconds)
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
        self.loader.set_shards(self.world.rank, counts)
        self.history = [change for change in self.history if change[0] < step]
        self.history.append((step, counts))
        self.log_message(
            f"shards=auto: using shards [{','.join(map(str, counts))}] from step {step}, because {reason}; "
            f"this reduces the step time of the slowest rank to {seconds / current_seconds:.0%} of its previous value"
        )
        return True
