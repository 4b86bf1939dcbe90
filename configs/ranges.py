"""Number fields with a range."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def at_least(low: float, default: float, only: str = "") -> Any:
    """Return a number field that must be >= low; it has an effect with the setting `only`, as in `mode=sync`."""
    return field(default=default, metadata={"low": low, "only": only})


def between(low: float, high: float, default: float, only: str = "") -> Any:
    """Return a number field that must lie in [low, high]; `only` as for `at_least`."""
    return field(default=default, metadata={"low": low, "high": high, "only": only})
