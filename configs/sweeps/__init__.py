"""Grids of settings: YAML files for `make sweep`, and NAME.py for `sweep=true` of the experiment NAME.

A Python grid consists of two functions: the first one lists the points, and the second one turns the results into table
lines and plots. slurm/launch/experiment_sweep.py runs the grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, Generic, NamedTuple, TypeVar

from configs.fields import find_group
from configs.shared import Sweep

PointSettings = dict[str, Any]  # settings of a point that differ from the config, by dotted name
RunRow = dict[str, Any]  # a finished run: its `cell` (the point's settings) and all values of its result, by name
Points = Sequence[tuple[float, float, float]]  # tuples of x, mean and standard deviation
T = TypeVar("T")


@dataclass(frozen=True)
class Bars:
    """A bar chart of means and standard deviations by label."""

    file: str
    heights: Mapping[str, tuple[float, float]]
    y: str
    title: str = ""


@dataclass(frozen=True)
class Curves:
    """A line chart of measured series, computed series (drawn dashed) and horizontal lines."""

    file: str
    series: Mapping[str, Points]
    x: str
    y: str
    levels: Mapping[str, float] = field(default_factory=dict)
    computed: Mapping[str, Points] = field(default_factory=dict)
    title: str = ""


@dataclass(frozen=True)
class Summary:
    """The summary of a sweep: the lines of the printed table, and the plots."""

    lines: Mapping[str, str]
    plots: Sequence[Bars | Curves]


@dataclass(frozen=True)
class SweepGrid(Generic[T]):
    """The sweep of one experiment: functions that list the points and summarize the runs."""

    points: Callable[[T, int], list[PointSettings]]
    """Function that maps the config and the number of visible GPUs to the points, in execution order."""
    summarize: Callable[[T, int, list[RunRow]], Summary]
    """Function that maps the config, the number of visible GPUs and the finished runs to table lines and plots."""
    new_seeds: bool = False
    """Whether repeats of a point use different seeds. Sweeps that measure accuracies need different seeds; sweeps that
    measure times use the same seed for all repeats."""


def is_sweep(cfg: object) -> bool:
    """Return whether a config has sweep=true."""
    settings = find_group(cfg, Sweep)
    return settings is not None and settings.sweep


def format_settings(cell: PointSettings) -> dict[str, str]:
    """Format the value of each setting of a point for a command line."""
    return {name: format_setting(value) for name, value in cell.items()}


def format_setting(value: Any) -> str:
    """Format a value for a command line, for example `true` or `[a,b]`."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)


class Average(NamedTuple):
    """The mean and standard deviation of one result over several runs."""

    mean: float
    deviation: float
    """Standard deviation, or 0 for a single run."""
    runs: int


def average_rows(rows: Sequence[RunRow], by: Sequence[str], value: str) -> dict[tuple[Any, ...], Average]:
    """Group runs by the settings `by`, and average the result named `value` within each group.

    A missing result, such as the loss of a diverged run, is treated as NaN.
    """
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        key = tuple(row["cell"].get(name) for name in by)
        number = math.nan if row.get(value) is None else float(row[value])
        groups.setdefault(key, []).append(number)
    averages = {}
    for key, numbers in groups.items():
        deviation = stdev(numbers) if len(numbers) > 1 else 0.0
        averages[key] = Average(fmean(numbers), deviation, len(numbers))
    return averages
