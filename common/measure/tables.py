"""Tables of text."""

from __future__ import annotations

from collections.abc import Mapping


def format_table(rows: Mapping[str, str]) -> str:
    """Return two columns of text; a value of several lines stays in its column."""
    width = max(map(len, rows))
    lines = []
    for name, value in rows.items():
        first, *more = value.split("\n")
        lines.append(f"  {name:<{width}}  {first}".rstrip())
        lines += [f"  {'':<{width}}  {line}" for line in more]
    return "\n".join(lines)
