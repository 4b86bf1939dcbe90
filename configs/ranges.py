"""Number fields with a range."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def at_least(low: float, default: float) -> Any:
    """Return a number field that must be >= low."""
    return field(default=default, metadata={"low": low})


def between(low: float, high: float, default: float) -> Any:
    """Return a number field that must lie in [low, high]."""
    return field(default=default, metadata={"low": low, "high": high})
