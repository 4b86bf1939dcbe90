"""The one rule that names a straggler, for the final table and for `make status`. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

RATIO = 1.25  # times the median of the other ranks
MINIMUM = 1e-3  # seconds more than that median: less is the jitter of a short step


def find_straggler(seconds: Sequence[float | None], samples: Sequence[float | None] = ()) -> int | None:
    """Return the rank that needs clearly longer than the others, or None.

    `seconds` holds each rank's time from the start of a step until backward begins; None or 0 where it is unknown.
    The time of the whole step cannot tell: the all-reduce makes it the same for all. `samples` holds each rank's
    samples of a batch where these are unequal: a rank that needs longer only because it has more is no straggler.
    """
    known = {rank: value for rank, value in enumerate(seconds) if value}
    if len(known) < 2:
        return None
    slowest = max(known, key=lambda rank: known[rank])
    others = median(value for rank, value in known.items() if rank != slowest)
    if known[slowest] <= max(RATIO * others, others + MINIMUM):
        return None
    per_sample = {rank: known[rank] / count for rank, count in enumerate(samples) if count and rank in known}
    others_per_sample = [value for rank, value in per_sample.items() if rank != slowest]
    if slowest in per_sample and others_per_sample and per_sample[slowest] <= RATIO * median(others_per_sample):
        return None
    return slowest
