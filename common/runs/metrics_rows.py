"""Parser of the rows of metrics.jsonl, which recognises damaged rows. Imports no torch."""

from __future__ import annotations

import json
from typing import Any

NUMBER_TYPES = {int, float, bool, type(None)}
"""The types of values in a row."""


def parse_rows(lines: list[str]) -> list[dict[str, Any] | None]:
    """Parse lines of metrics; a truncated or damaged line becomes None."""
    try:
        rows = json.loads(f"[{','.join(lines)}]")  # takes half the time of parsing line by line
    except ValueError:
        rows = []
    if len(rows) != len(lines):
        rows = [parse_json(line) for line in lines]
    return [row if is_row(row) else None for row in rows]


def parse_json(text: str) -> Any:
    """Parse a JSON text; return None if it is damaged."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def is_row(content: Any) -> bool:
    """Return whether a value is a row of metrics.

    A row is a dict with a step, and a number or null under every name.
    """
    return (
        isinstance(content, dict)
        and type(content.get("global_step")) is int
        and NUMBER_TYPES.issuperset(map(type, content.values()))
    )
