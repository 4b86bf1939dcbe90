"""What a result says in single numbers, for tables and for the W&B summary."""

from __future__ import annotations

import math
from typing import Any


def number(value: Any) -> float | None:
    """A finite number, or None."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def waiting(result: dict[str, Any]) -> float | None:
    """The share of the time that processes wait for each other: idle in a pipeline, or in communication.

    None where a run measured neither.
    """
    each = result.get("idle_share")
    if isinstance(each, list) and each and None not in [number(one) for one in each]:
        return float(sum(each) / len(each))
    names = ("communication_seconds", "communication_exposed", "step_seconds")
    sent, exposed, step = (number(result.get(name)) for name in names)
    return None if sent is None or exposed is None or not step else sent * exposed / step


def memory(result: dict[str, Any]) -> float | None:
    """MB that the process or device with most took at its peak, as its experiment measures that."""
    bytes_of, megabytes = result.get("peak_memory"), result.get("memory_megabytes")
    each = list(bytes_of.values()) if isinstance(bytes_of, dict) else [bytes_of]
    found = [one / 1e6 for one in map(number, each) if one is not None]
    found += [one for one in map(number, megabytes if isinstance(megabytes, list) else []) if one is not None]
    return max(found, default=None)


def flat(result: dict[str, Any]) -> dict[str, Any]:
    """The numbers and words of a result, with the share of waiting and the memory among them."""
    found = {name: value for name, value in result.items() if isinstance(value, int | float | str)}
    more = {"waiting": waiting(result), "memory_mb": memory(result)}
    return found | {name: value for name, value in more.items() if value is not None}
