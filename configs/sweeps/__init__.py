"""Grids of settings: a YAML file for `make sweep`, or NAME.py for `sweep=true` of experiment NAME.

A Python grid consists of functions that list the points and that turn their results into table lines and plots.
slurm/launch/experiment_sweep.py runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, Generic, NamedTuple, TypeVar

PointSettings = dict[str, Any]  # the settings of a point that differ from the config, by dotted name
RunRow = dict[str, Any]  # a finished run: its `cell`, and all values of its result by name
Points = Sequence[tuple[float, float, float]]  # x, mean, standard deviation
T = TypeVar("T")


@dataclass(frozen=True)
class Bars:
    """Bar chart: mean and standard deviation by label."""

    file: str
    heights: Mapping[str, tuple[float, float]]
    y: str
    title: str = ""


@dataclass(frozen=True)
class Curves:
    """Line chart: measured series, computed series (dashed), and horizontal levels."""

    file: str
    series: Mapping[str, Points]
    x: str
    y: str
    levels: Mapping[str, float] = field(default_factory=dict)
    computed: Mapping[str, Points] = field(default_factory=dict)
    title: str = ""


@dataclass(frozen=True)
class Summary:
    """Result of a sweep: lines of the printed table, and plots."""

    lines: Mapping[str, str]
    plots: Sequence[Bars | Curves]


@dataclass(frozen=True)
class SweepGrid(Generic[T]):
    """A sweep of one experiment."""

    points: Callable[[T, int], list[PointSettings]]
    """Maps the config and the number of visible GPUs to the points, in the order of execution."""
    summarise: Callable[[T, int, list[RunRow]], Summary]
    """Maps the config, the number of GPUs and the finished runs to table lines and plots."""
    new_seeds: bool = False
    """Use another seed for each repeat, as needed for accuracies; times are repeated with the same seed."""
    measured: tuple[str, ...] = ()
    """Settings that a run may determine by measurement; repeats of a point reuse the values of its first run."""


def format_settings(cell: PointSettings) -> dict[str, str]:
    """Return the settings of a point as text for a command line."""
    return {name: format_setting(value) for name, value in cell.items()}


def format_setting(value: Any) -> str:
    """Format a value as on a command line, as in `true` and `[a,b]`."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)


class Average(NamedTuple):
    """Statistics of one result over several runs."""

    mean: float
    deviation: float
    """Standard deviation; 0 for a single run."""
    runs: int


def average_rows(rows: Sequence[RunRow], by: Sequence[str], value: str) -> dict[tuple[Any, ...], Average]:
    """Average a result over runs, grouped by the settings `by`.

    A missing result, such as the loss of a diverged run, counts as nan.
    """
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        key = tuple(row["cell"].get(name) for name in by)
        number = math.nan if row[value] is None else float(row[value])
        groups.setdefault(key, []).append(number)
    averages = {}
    for key, numbers in groups.items():
        deviation = stdev(numbers) if len(numbers) > 1 else 0.0
        averages[key] = Average(fmean(numbers), deviation, len(numbers))
    return averages
