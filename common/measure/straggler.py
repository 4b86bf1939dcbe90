"""Definition of a straggler: a rank that is clearly slower than the other ranks.

The final table of a run and `make status` use this definition. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

MIN_RATIO = 1.25
"""Minimum ratio of a straggler's time to the median time of the other ranks."""
MIN_SECONDS = 1e-3
"""Minimum difference in seconds between a straggler's time and the median time of the other ranks.

Smaller differences may be random."""


def find_straggler(seconds: Sequence[float | None], samples: Sequence[float | None] = ()) -> int | None:
    """Return the rank that is clearly slower than the others; None if there is none.

    `seconds` contains each rank's time from the start of a step to the start of backward. An unknown time is None or 0.
    The duration of the entire step cannot be used, because the all-reduce makes the duration equal on all ranks.
    `samples` contains each rank's number of samples per batch if the shards are unequal. A rank that is slower only
    because the rank has more samples is not a straggler.
    """
    rank_seconds = {rank: value for rank, value in enumerate(seconds) if value}
    if len(rank_seconds) < 2:
        return None
    slowest = max(rank_seconds, key=lambda rank: rank_seconds[rank])
    slowest_seconds = rank_seconds.pop(slowest)
    median_seconds = median(rank_seconds.values())
    if slowest_seconds <= max(MIN_RATIO * median_seconds, median_seconds + MIN_SECONDS):
        return None

    # If the shards are unequal, the time per sample of a straggler must also exceed MIN_RATIO times the median.
    counts = {rank: count for rank, count in enumerate(samples) if count}
    per_sample = [value / counts[rank] for rank, value in rank_seconds.items() if rank in counts]
    if slowest in counts and per_sample and slowest_seconds / counts[slowest] <= MIN_RATIO * median(per_sample):
        return None
    return slowest
