"""Compute the curves of a run's metrics, with few enough points for a chart. This module does not import torch.

Each point of a long curve is the mean of a group of consecutive rows, with the minimum and maximum of the group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 400  # maximum number of points of one curve
LOG_SPACED_POINTS = 80  # number of these points that are log-spaced, for a logarithmic axis
AXES = ("global_step", "samples", "time")
NO_CURVE = (*AXES, "test_samples")  # the number of test samples is the same in every evaluation
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """The values of one metric during a run. All arrays have the same length."""

    positions: Numbers
    """Step, number of samples and time in seconds of each point, with shape [points, 3]."""
    value: Numbers
    low: Numbers
    high: Numbers
    newest_value: float | None
    """Newest finite value that the run logged, or None. The last point of a long curve is a mean of several values."""

    def __len__(self) -> int:
        return len(self.value)

    @property
    def has_range(self) -> bool:
        """Whether the points are means of different values."""
        return not np.array_equal(self.low, self.high, equal_nan=True)


@dataclass(frozen=True)
class RunCurves:
    """The curves of a run by the name of the metric."""

    steps: dict[str, Curve] = field(default_factory=dict)
    """Curves of the values of training steps, such as loss, samples_per_second and step_time."""
    tests: dict[str, Curve] = field(default_factory=dict)
    """Curves of the values of evaluations, such as test_accuracy."""

    @property
    def last_step(self) -> float:
        """Last step of any curve, or 0 without curves."""
        curves = [*self.steps.values(), *self.tests.values()]
        return max((float(curve.positions[-1, 0]) for curve in curves), default=0.0)


class MetricTable:
    """The values of many metrics, which need not be logged at the same steps."""

    def __init__(self) -> None:
        self.positions: list[tuple[float, ...]] = []
        self.row_numbers: dict[str, list[int]] = {}
        self.values: dict[str, list[float]] = {}

    def add_row(self, position: tuple[float, ...], row: Mapping[str, Any]) -> None:
        """Add the values of a row. Missing values are stored as NaN."""
        number = len(self.positions)
        self.positions.append(position)
        for name, value in row.items():
            if name not in NO_CURVE:
                self.row_numbers.setdefault(name, []).append(number)
                self.values.setdefault(name, []).append(np.nan if value is None else value)

    def compute_curves(self) -> dict[str, Curve]:
        """Return the curve of each metric, averaged over groups of rows."""
        positions = np.array(self.positions, dtype=np.float64).reshape(-1, len(AXES))
        curves = {}
        for name, values in self.values.items():
            numbers = np.array(values, dtype=np.float64)
            curves[name] = average_row_groups(positions[self.row_numbers[name]], numbers, np.ones(len(numbers)))
        return curves


def read_curves(rows: Iterable[dict[str, Any]], last_steps: Collection[int] = ()) -> RunCurves:
    """Compute the curves of a run from its metric rows. Malformed rows are skipped.

    `last_steps` contains the steps from which later attempts of the run resumed. The samples per second and the time
    per step are computed for runs of older versions, which did not log them.
    """
    training = MetricTable()
    evaluations = MetricTable()
    timed_steps: list[tuple[float, ...]] = []  # step, samples, time, whether it follows an evaluation or restart
    is_interrupted = True
    for row in rows:
        position = tuple(row.get(axis) for axis in AXES)
        if not all(isinstance(number, int | float) for number in position):
            continue
        if is_evaluation(row):
            evaluations.add_row(position, row)  # type: ignore[arg-type]
            is_interrupted = True
            continue
        training.add_row(position, row)  # type: ignore[arg-type]
        if "loss" in row:  # a row without a loss may belong to a measurement, which trains no model
            timed_steps.append((*position, is_interrupted))  # type: ignore[arg-type]
            is_interrupted = row["global_step"] in last_steps

    step_curves = compute_speed_curves(np.array(timed_steps, dtype=np.float64).reshape(-1, 4))
    step_curves |= training.compute_curves()
    return RunCurves(step_curves, evaluations.compute_curves())


def is_evaluation(row: Mapping[str, Any]) -> bool:
    """Return whether a row contains the values of an evaluation."""
    return "loss" not in row and any(name.startswith("test_") for name in row)


def compute_group_bounds(count: int) -> NDArray[np.int64]:
    """Return the bounds of groups of consecutive rows, as at most MAX_POINTS + 1 indices.

    Groups at the start of the run are smaller.
    """
    if count <= MAX_POINTS:
        return np.arange(count + 1)
    evenly_spaced = np.linspace(0, count, MAX_POINTS - LOG_SPACED_POINTS + 1)
    log_spaced = np.geomspace(1, count, LOG_SPACED_POINTS)
    return np.unique(np.concatenate([evenly_spaced, log_spaced]).astype(np.int64))


def average_row_groups(positions: Numbers, numerators: Numbers, denominators: Numbers) -> Curve:
    """Return sum(numerators) / sum(denominators) for each group of rows. There must be at least one row.

    Each point has the position of the last row in its group.
    """
    bounds = compute_group_bounds(len(positions))
    first_rows = bounds[:-1]
    last_rows = bounds[1:] - 1
    ratios = numerators / denominators
    means = np.add.reduceat(numerators, first_rows) / np.add.reduceat(denominators, first_rows)
    minima = np.minimum.reduceat(ratios, first_rows)
    maxima = np.maximum.reduceat(ratios, first_rows)
    return Curve(positions[last_rows], means, minima, maxima, find_newest_value(ratios))


def find_newest_value(values: Numbers) -> float | None:
    """Return the last finite value, or None if no value is finite."""
    finite_values = values[np.isfinite(values)]
    return float(finite_values[-1]) if len(finite_values) else None


def compute_speed_curves(table: Numbers) -> dict[str, Curve]:
    """Return the curves of samples per second and seconds per step from a table of shape [steps, 4].

    Steps that follow an evaluation or a restart are excluded.
    """
    steps, samples, seconds = np.diff(table[:, :3], axis=0).T
    is_counted = (table[1:, 3] == 0) & (seconds > 0)
    if not is_counted.any():
        return {}
    positions = table[1:, :3][is_counted]
    return {
        "samples_per_second": average_row_groups(positions, samples[is_counted], seconds[is_counted]),
        "step_time": average_row_groups(positions, seconds[is_counted], steps[is_counted]),
    }


def average_runs(runs: Sequence[RunCurves]) -> RunCurves:
    """Return the mean, minimum and maximum of several runs for each metric."""
    steps: dict[str, list[Curve]] = {}
    tests: dict[str, list[Curve]] = {}
    for run in runs:
        for curves, by_name in ((run.steps, steps), (run.tests, tests)):
            for name, curve in curves.items():
                by_name.setdefault(name, []).append(curve)
    return RunCurves(
        {name: average_curves(curves) for name, curves in steps.items()},
        {name: average_curves(curves) for name, curves in tests.items()},
    )


def average_curves(curves: Sequence[Curve]) -> Curve:
    """Return the mean, minimum and maximum of several curves at each step of the longest curve.

    Values between two points are interpolated. After its last step, a shorter curve does not count.
    """
    steps = max((curve.positions[:, 0] for curve in curves), key=lambda steps: steps[-1])
    values = np.ma.masked_invalid([interpolate(steps, curve, curve.value) for curve in curves])
    axes = [steps]
    for axis in (1, 2):
        positions = [interpolate(steps, curve, curve.positions[:, axis]) for curve in curves]
        axes.append(np.ma.masked_invalid(positions).mean(axis=0).filled(np.nan))
    mean, low, high = (statistic.filled(np.nan) for statistic in (values.mean(0), values.min(0), values.max(0)))
    newest_values = [curve.newest_value for curve in curves if curve.newest_value is not None]
    newest_mean = float(np.mean(newest_values)) if newest_values else None
    return Curve(np.column_stack(axes), mean, low, high, newest_mean)


def interpolate(steps: Numbers, curve: Curve, values: Numbers) -> Numbers:
    """Return values of a curve at other steps, or NaN outside of the curve."""
    return np.interp(steps, curve.positions[:, 0], values, left=np.nan, right=np.nan)
