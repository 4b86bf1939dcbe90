"""Dataclass fields for numbers within a range."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def at_least(low: float, default: float, only: str = "") -> Any:
    """Define a dataclass field for a number that is at least `low`.

    `only` names the setting that makes the field effective, such as `mode=sync`.
    """
    return field(default=default, metadata={"low": low, "only": only})


def between(low: float, high: float, default: float, only: str = "") -> Any:
    """Define a dataclass field for a number from `low` to `high`.

    `only` has the same meaning as in `at_least`.
    """
    return field(default=default, metadata={"low": low, "high": high, "only": only})
