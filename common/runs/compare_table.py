"""A table of text that is as wide as the terminal at most. Imports no torch."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 120  # where the output is no terminal, and COLUMNS is not set
CELL = 24  # characters that are shown of a value
GAP = "  "


@dataclass(frozen=True)
class Column:
    """One column: its head, a cell for each line, and where they stand in it."""

    head: str
    cells: Sequence[str]
    left: bool = False

    @property
    def lines(self) -> list[str]:
        return [self.head, *self.cells]

    @property
    def width(self) -> int:
        return max(map(len, self.lines))

    def align(self) -> list[str]:
        """Head and cells, all of the same length."""
        return [line.ljust(self.width) if self.left else line.rjust(self.width) for line in self.lines]


def shorten_text(text: str) -> str:
    """The beginning of a text that is too long for a cell."""
    return text if len(text) <= CELL else text[: CELL - 1] + "…"


def get_terminal_width() -> int:
    """Characters in a line of the terminal; a fixed number where there is none."""
    return shutil.get_terminal_size((WIDTH, 24)).columns


def choose_columns(columns: Sequence[Column], width: int) -> list[Column]:
    """Return the first column and those that fit beside it; an earlier one goes before a later one."""
    found, used = list(columns[:1]), sum(column.width for column in columns[:1])
    for column in columns[1:]:
        if used + len(GAP) + column.width <= width:
            used += len(GAP) + column.width
            found.append(column)
    return found


def join_columns(columns: Sequence[Column]) -> list[str]:
    """The lines of the table, of which the first is the head."""
    return [GAP.join(cells).rstrip() for cells in zip(*(column.align() for column in columns), strict=True)]
