"""Comparison of the memory and the messages that each rank has measured with the values of formulas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TOLERANCES = {"state": 0.05, "activation": 0.05, "sent": 0.01}
"""Largest relative difference of measured bytes from a formula, by category."""
SENT_NUMBERS_BYTES = 100
"""Limit for the messages that no formula counts, such as the norm of the gradients."""


def list_rank_formula_gaps(result: Mapping[str, Any], tolerances: Mapping[str, float] = TOLERANCES) -> list[str]:
    """Return the categories in which the measurement of a rank is not the value of its formula."""
    gaps = []
    for name, tolerance in tolerances.items():
        uncounted = SENT_NUMBERS_BYTES if name == "sent" else 0
        assert result[f"rank_{name}_bytes"], f"no rank has measured {name}"
        pairs = zip(result[f"rank_{name}_bytes"], result[f"rank_{name}_formula"], strict=True)
        for rank, (measured, formula) in enumerate(pairs):
            if abs(measured - formula) > tolerance * formula + uncounted:
                gaps.append(f"{name} of rank {rank}: {measured} bytes, {formula} by the formula")
    return gaps
