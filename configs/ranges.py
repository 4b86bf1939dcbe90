"""Number fields with a range."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def at_least(low: float, default: float, only: str = "") -> Any:
    """Define a number field that is at least `low`; `only` is a setting it depends on, as in `mode=sync`."""
    return field(default=default, metadata={"low": low, "only": only})


def between(low: float, high: float, default: float, only: str = "") -> Any:
    """Define a number field in [low, high]; `only` as for `at_least`."""
    return field(default=default, metadata={"low": low, "high": high, "only": only})
