"""Tables of text."""

from __future__ import annotations

from collections.abc import Mapping


def format_table(rows: Mapping[str, str]) -> str:
    """Return a table with two columns; the lines of a value stay in its column."""
    width = max(map(len, rows))
    lines = []
    for name, value in rows.items():
        first_line, *lines_below = value.split("\n")
        lines.append(f"  {name:<{width}}  {first_line}".rstrip())
        lines += [f"  {'':<{width}}  {line}" for line in lines_below]
    return "\n".join(lines)
