"""Dataclass fields for numbers within a range, and for settings that may name custom code."""

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


def custom_code(default: str, kind: str, checker: str, *, rank_0_only: bool = False) -> Any:
    """Define a dataclass field whose value may be `FILE.py:name`.

    `kind` is the kind of code that the file defines, such as `schedule`. `checker` is the import path
    `module:function` of a function that takes the config and raises UserError if a value other than the default is
    invalid. With `rank_0_only`, only rank 0 reads the file.
    """
    return field(
        default=default, metadata={"custom_code": {"kind": kind, "checker": checker, "rank_0_only": rank_0_only}}
    )
