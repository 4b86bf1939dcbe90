"""Division of the samples of one optimizer step into shards and microbatches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchPlan:
    """Sizes of the shards and microbatches of one optimizer step.

    `Loader` creates the shards and microbatches of a rank. The `step` of a pipeline engine splits its batch into
    microbatches itself.
    """

    batch: int
    """Samples per step, over all ranks."""
    replicas: int = 1
    """Ranks or pipelines; each takes one shard."""
    microbatches: int = 1
    """Parts of a shard that are computed in sequence with summed gradients."""
    weights: tuple[int, ...] = ()
    """Relative shard sizes, one per replica; empty for equal shards."""

    @property
    def shard(self) -> int:
        """Samples per replica if all shards are equal."""
        return self.batch // self.replicas

    @property
    def microbatch(self) -> int:
        """Samples per microbatch of a replica."""
        return self.shard // self.microbatches


def divide_batch(batch: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Divide a batch among ranks in proportion to their weights; return the samples of each rank.

    Counts are rounded down; the remaining samples go to the ranks with the largest remainders, lower ranks first
    (Hamilton's method).
    """
    total = sum(weights)
    counts = [batch * weight // total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda rank: -(batch * weights[rank] % total))
    missing = batch - sum(counts)
    for rank in by_remainder[:missing]:
        counts[rank] += 1
    return tuple(counts)


def list_divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending."""
    up_to_root = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return up_to_root + [number // d for d in reversed(up_to_root) if d * d != number]


def format_nearest_multiples(number: int, factor: int) -> str:
    """Format the positive multiples of `factor` next to a number, as in "62 or 64"."""
    lower = number // factor * factor
    higher = lower + factor
    return f"{lower} or {higher}" if lower else str(higher)
