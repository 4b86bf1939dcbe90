"""Division of the samples of an optimizer step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchPlan:
    """Division of the samples of one optimizer step: shards for the replicas, and microbatches of these.

    These are the sizes. `Loader` makes a rank's shards and microbatches, and the `step` of a
    pipeline's engine splits its batch into microbatches itself.
    """

    batch: int
    """Samples of a step, over all ranks."""
    replicas: int = 1
    """Ranks, or pipelines, that take a shard each."""
    microbatches: int = 1
    """Parts of a shard that are computed one after the other, and whose gradients add up."""
    weights: tuple[int, ...] = ()
    """What the shards are in proportion to, one for each replica; empty where they are equal."""

    @property
    def shard(self) -> int:
        """Samples that a replica gets where all get as many."""
        return self.batch // self.replicas

    @property
    def microbatch(self) -> int:
        """Samples of a replica's microbatch."""
        return self.shard // self.microbatches


def cut_batch(batch: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Return the samples of each rank in proportion to its weight: whole numbers >= 0 that add up to `batch`.

    What rounding down leaves goes to the largest remainders, and of equal ones to the first (Hamilton's method).
    """
    total = sum(weights)
    counts = [batch * weight // total for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda rank: -(batch * weights[rank] % total))
    for rank in by_remainder[: batch - sum(counts)]:
        counts[rank] += 1
    return tuple(counts)


def list_divisors(n: int) -> list[int]:
    """Return all divisors of n, ascending."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


def format_nearest_multiples(n: int, of: int) -> str:
    """Return the positive multiples of `of` next to n, as in "62 or 64"."""
    return " or ".join(str(m) for m in (n // of * of, (n // of + 1) * of) if m)
