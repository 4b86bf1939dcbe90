"""The definition of a straggler, for the final table and for `make status`. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

MIN_RATIO = 1.25
"""Time of a straggler, relative to the median of the other ranks."""
MIN_SECONDS = 1e-3
"""Excess of a straggler's time over that median; less is jitter."""


def find_straggler(seconds: Sequence[float | None], samples: Sequence[float | None] = ()) -> int | None:
    """Return the rank that is clearly slower than the others, or None.

    `seconds` has each rank's time from the start of a step until backward begins; None or 0 if it is unknown. The time
    of the whole step is useless because the all-reduce makes it equal. `samples` has each rank's samples of a batch if
    these are unequal: a rank that is slower only because it has more samples is not a straggler.
    """
    rank_seconds = {rank: value for rank, value in enumerate(seconds) if value}
    if len(rank_seconds) < 2:
        return None
    slowest = max(rank_seconds, key=lambda rank: rank_seconds[rank])
    slowest_seconds = rank_seconds.pop(slowest)
    median_seconds = median(rank_seconds.values())
    if slowest_seconds <= max(MIN_RATIO * median_seconds, median_seconds + MIN_SECONDS):
        return None

    counts = {rank: count for rank, count in enumerate(samples) if count}
    per_sample = [value / counts[rank] for rank, value in rank_seconds.items() if rank in counts]
    if slowest in counts and per_sample and slowest_seconds / counts[slowest] <= MIN_RATIO * median(per_sample):
        return None
    return slowest
