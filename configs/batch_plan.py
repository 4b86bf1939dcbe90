"""Division of a batch, the samples of one optimizer step, into shards and microbatches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchPlan:
    """The sizes of the shards and microbatches of one optimizer step.

    `Loader` creates the shards and microbatches of a rank. In pipeline parallelism, the `step` method of the pipeline
    engine creates the microbatches instead.
    """

    batch: int
    """Number of samples per optimizer step, over all ranks."""
    replicas: int = 1
    """Number of model replicas (ranks or pipelines). Each replica processes one shard of the batch."""
    microbatches: int = 1
    """Number of microbatches per shard. Microbatches are processed in sequence, and their gradients are summed."""
    weights: tuple[int, ...] = ()
    """Relative shard sizes, one per replica; an empty tuple means equal shards."""

    @property
    def shard(self) -> int:
        """Number of samples per replica if all shards are equal."""
        return self.batch // self.replicas

    @property
    def microbatch(self) -> int:
        """Number of samples per microbatch of a replica if all shards are equal."""
        return self.shard // self.microbatches


def divide_batch(batch: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Return the number of samples of each rank, in proportion to the ranks' weights.

    Each number is first rounded down. The remaining samples are given to the ranks with the largest remainders
    (Hamilton's method). Among ranks with equal remainders, lower ranks have priority.
    """
    total = sum(weights)
    counts = [batch * weight // total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda rank: -(batch * weights[rank] % total))  # largest first
    missing = batch - sum(counts)
    for rank in by_remainder[:missing]:
        counts[rank] += 1
    return tuple(counts)


def check_sample_count(batch: int, limit: int, samples: int | None) -> None:
    """Raise ValueError if a batch exceeds data.train_limit, unless 0, or the number of training samples, if known."""
    if 0 < limit < batch:
        problem = f"data.train_limit={limit} is smaller than one batch of {batch}"
        raise ValueError(f"{problem}; lower batch or raise data.train_limit")
    if samples is not None and batch > samples:
        raise ValueError(f"batch={batch} exceeds the {samples} training samples; lower batch")


def list_divisors(number: int) -> list[int]:
    """Return all divisors of a number in ascending order."""
    up_to_root = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return up_to_root + [number // d for d in reversed(up_to_root) if d * d != number]


def format_nearest_multiples(number: int, factor: int) -> str:
    """Format the positive multiples of `factor` next to a number, for example "62 or 64"."""
    lower = number // factor * factor
    higher = lower + factor
    return f"{lower} or {higher}" if lower else str(higher)
