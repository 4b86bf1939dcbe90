"""Format a text table that fits the width of the terminal. This module does not import torch."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_WIDTH = 120  # width in characters if the output is not a terminal and COLUMNS is not set
DEFAULT_HEIGHT = 24  # height in lines
MAX_CELL_WIDTH = 24  # maximum width of a cell in characters
GAP = "  "


@dataclass(frozen=True)
class Column:
    """A table column with a title, one cell per row, and an alignment."""

    title: str
    cells: Sequence[str]
    is_left_aligned: bool = False

    @property
    def lines(self) -> list[str]:
        return [self.title, *self.cells]

    @property
    def width(self) -> int:
        return max(map(len, self.lines))

    def align(self) -> list[str]:
        """Return the title and the cells, padded to the same length."""
        pad = str.ljust if self.is_left_aligned else str.rjust
        return [pad(line, self.width) for line in self.lines]


def shorten_text(text: str) -> str:
    """Truncate text that is too long for a cell, and mark the omission with an ellipsis.

    A value FILE.py:name first loses the folder of the file.
    """
    if len(text) > MAX_CELL_WIDTH and ".py:" in text and "," not in text:
        text = text.rpartition("/")[2]
    return text if len(text) <= MAX_CELL_WIDTH else text[: MAX_CELL_WIDTH - 1] + "…"


def get_terminal_width() -> int:
    """Return the width of the terminal in characters, or a default width."""
    return shutil.get_terminal_size((DEFAULT_WIDTH, DEFAULT_HEIGHT)).columns


def choose_columns(columns: Sequence[Column], width: int) -> list[Column]:
    """Return the first column and as many other columns as fit next to it.

    Earlier columns take precedence over later columns.
    """
    selected = list(columns[:1])
    total_width = sum(column.width for column in selected)
    for column in columns[1:]:
        new_width = total_width + len(GAP) + column.width
        if new_width <= width:
            total_width = new_width
            selected.append(column)
    return selected


def join_columns(columns: Sequence[Column]) -> list[str]:
    """Return the lines of the table. The first line contains the column titles."""
    aligned = [column.align() for column in columns]
    return [GAP.join(cells).rstrip() for cells in zip(*aligned, strict=True)]
