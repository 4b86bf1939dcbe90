"""Which steps of a run count toward its speed. This module does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

WARM_UP = 10
"""Number of steps at the start of a run that are excluded from measurements."""


def select_steady_steps(durations: Sequence[float]) -> Sequence[float]:
    """Return the durations of all steps after the first WARM_UP steps.

    In a short run, only the first third of the steps is excluded.
    """
    return durations[min(WARM_UP, len(durations) // 3) :]
