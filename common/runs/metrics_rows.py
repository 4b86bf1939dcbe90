"""Parse the rows of metrics.jsonl and detect damaged rows. This module does not import torch."""

from __future__ import annotations

import json
from typing import Any

NUMBER_TYPES = {int, float, bool, type(None)}
"""Types that the values of a row may have."""


def parse_rows(lines: list[str]) -> list[dict[str, Any] | None]:
    """Parse lines of metrics.jsonl into rows. For a truncated or damaged line, the row is None."""
    try:
        rows = json.loads(f"[{','.join(lines)}]")  # twice as fast as parsing each line separately
    except ValueError:
        rows = []
    if len(rows) != len(lines):
        rows = [parse_json(line) for line in lines]
    return [row if is_row(row) else None for row in rows]


def parse_json(text: str) -> Any:
    """Parse JSON text. Return None if the text is not valid JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def is_row(content: Any) -> bool:
    """Return whether a value is a metric row.

    A metric row is a dict that contains an integer step and whose values are all numbers or null.
    """
    return (
        isinstance(content, dict)
        and type(content.get("global_step")) is int
        and NUMBER_TYPES.issuperset(map(type, content.values()))
    )
