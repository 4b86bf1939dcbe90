"""Words of messages."""

from __future__ import annotations


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun, as in `1 rank`, `2 ranks` and `2 processes`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}{'es' if noun.endswith('s') else 's'}"
