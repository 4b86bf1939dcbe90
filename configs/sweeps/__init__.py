"""Grids of settings: a YAML file for `make sweep`, or NAME.py with the grid that `sweep=true` runs of experiment NAME.

A Python grid is data and functions of data: which points there are, and what is to be told and drawn of their results.
slurm/launch/experiment_sweep.py runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, Generic, TypeVar

Cell = dict[str, Any]  # the settings, by dotted name, in which a point differs from the others
Row = dict[str, Any]  # a finished run: its `cell`, and every value of its result by name
Points = Sequence[tuple[float, float, float]]  # x, mean, deviation
T = TypeVar("T")


@dataclass(frozen=True)
class Bars:
    """One bar a label, of mean and deviation."""

    file: str
    heights: Mapping[str, tuple[float, float]]
    y: str
    title: str = ""


@dataclass(frozen=True)
class Curves:
    """Lines through measured points, with dashed ones that are computed, and horizontal levels."""

    file: str
    series: Mapping[str, Points]
    x: str
    y: str
    levels: Mapping[str, float] = field(default_factory=dict)
    computed: Mapping[str, Points] = field(default_factory=dict)
    title: str = ""


@dataclass(frozen=True)
class Summary:
    """End of a sweep: lines of the table on the screen, and plots."""

    lines: Mapping[str, str]
    plots: Sequence[Bars | Curves]


@dataclass(frozen=True)
class Grid(Generic[T]):
    """A sweep of one experiment."""

    points: Callable[[T, int], list[Cell]]
    """From the config and the number of visible GPUs to the points, in the order they run."""
    summarise: Callable[[T, int, list[Row]], Summary]
    """From these and the finished runs to what is told and drawn."""
    new_seeds: bool = False
    """Whether each repeat has a seed of its own: right for accuracies; times are repeated with the same."""
    measured: tuple[str, ...] = ()
    """Settings that a run may measure for itself: what a point's first run finds holds for its repeats, too."""


def format_settings(cell: Cell) -> dict[str, str]:
    """Return the settings of a point as they are written on a command line."""

    def text(value: Any) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        return f"[{','.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)

    return {name: text(value) for name, value in cell.items()}


def average_rows(rows: Sequence[Row], by: Sequence[str], value: str) -> dict[tuple[Any, ...], tuple[float, float, int]]:
    """Return mean, standard deviation (0 of a single one) and count of a number, by the settings of points.

    A number that a result does not hold, such as a loss that was none, counts as nan.
    """
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        number = math.nan if row[value] is None else float(row[value])
        groups.setdefault(tuple(row["cell"].get(key) for key in by), []).append(number)
    return {key: (fmean(v), stdev(v) if len(v) > 1 else 0.0, len(v)) for key, v in groups.items()}
