"""Tables in plain text."""

from __future__ import annotations

from collections.abc import Mapping


def format_table(rows: Mapping[str, str]) -> str:
    """Return a text table with a column of names and a column of values.

    A value may have several lines, all of which are placed in the second column.
    """
    width = max(map(len, rows))
    lines = []
    for name, value in rows.items():
        first_line, *lines_below = value.split("\n")
        lines.append(f"  {name:<{width}}  {first_line}".rstrip())
        lines += [f"  {'':<{width}}  {line}" for line in lines_below]
    return "\n".join(lines)
