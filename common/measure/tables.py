"""Formatting of tables as plain text."""

from __future__ import annotations

from collections.abc import Mapping


def format_table(rows: Mapping[str, str]) -> str:
    """Format names and values as a text table with two columns.

    The lines of a value with several lines are placed below one another in the second column.
    """
    width = max(map(len, rows))
    lines = []
    for name, value in rows.items():
        first_line, *lines_below = value.split("\n")
        lines.append(f"  {name:<{width}}  {first_line}".rstrip())
        lines += [f"  {'':<{width}}  {line}" for line in lines_below]
    return "\n".join(lines)
