"""Compute the curves of a run's metrics, with few enough points for a chart. This module does not import torch.

Each point of a training curve is the mean of a group of consecutive steps, with the minimum and maximum of the group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
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

    def __len__(self) -> int:
        return len(self.value)


@dataclass(frozen=True)
class RunCurves:
    """The loss, speed and evaluation curves of a run."""

    loss: Curve
    speed: Curve
    """Samples per second, excluding evaluations and the time between attempts."""
    tests: dict[str, Curve] = field(default_factory=dict)
    """Curves of evaluation metrics by name, such as test_accuracy."""


def read_curves(rows: Iterable[dict[str, Any]], last_steps: Collection[int] = ()) -> RunCurves:
    """Compute the curves of a run from its metric rows. Malformed rows are skipped.

    `last_steps` contains the steps from which later attempts of the run resumed.
    """
    steps: list[tuple[float, ...]] = []  # step, samples, time, loss, whether it follows an evaluation or restart
    tests: dict[str, list[tuple[float, ...]]] = {}
    is_interrupted = True
    for row in rows:
        try:
            position = (row["global_step"], row["samples"], row["time"])
            if "loss" in row:
                loss = np.nan if row["loss"] is None else row["loss"]
                steps.append((*position, loss, is_interrupted))
                is_interrupted = row["global_step"] in last_steps
                continue
        except (KeyError, TypeError):
            continue
        is_interrupted = True
        for name, score in row.items():
            if name not in NO_CURVE and isinstance(score, int | float):
                tests.setdefault(name, []).append((*position, score))

    step_table = drop_non_numeric_rows(steps, columns=5)
    test_curves = {}
    for name, points in tests.items():
        table = drop_non_numeric_rows(points, columns=4)
        scores = table[:, 3]
        test_curves[name] = Curve(table[:, :3], scores, scores, scores)
    return RunCurves(compute_loss_curve(step_table), compute_speed_curve(step_table), test_curves)


def drop_non_numeric_rows(rows: list[tuple[float, ...]], columns: int) -> Numbers:
    """Return an array of shape [rows, columns] without the rows that contain non-numeric elements."""
    try:
        return np.array(rows, dtype=np.float64).reshape(len(rows), columns)
    except (TypeError, ValueError):
        rows = [row for row in rows if has_only_numbers(row)]
        return np.array(rows, dtype=np.float64).reshape(len(rows), columns)


def has_only_numbers(row: tuple[float, ...]) -> bool:
    """Return whether all elements of a row are numbers."""
    return all(isinstance(element, int | float) for element in row)


def compute_group_bounds(count: int) -> NDArray[np.int64]:
    """Return the bounds of groups of consecutive steps, as at most MAX_POINTS + 1 indices.

    Groups at the start of the run are smaller.
    """
    if count <= MAX_POINTS:
        return np.arange(count + 1)
    evenly_spaced = np.linspace(0, count, MAX_POINTS - LOG_SPACED_POINTS + 1)
    log_spaced = np.geomspace(1, count, LOG_SPACED_POINTS)
    return np.unique(np.concatenate([evenly_spaced, log_spaced]).astype(np.int64))


def average_step_groups(positions: Numbers, numerators: Numbers, denominators: Numbers) -> Curve:
    """Return sum(numerators) / sum(denominators) for each group of rows.

    Each point has the position of the last row in its group.
    """
    bounds = compute_group_bounds(len(positions))
    first_rows = bounds[:-1]
    if not len(first_rows):
        empty = np.empty(0)
        return Curve(np.empty((0, 3)), empty, empty, empty)
    last_rows = bounds[1:] - 1
    ratios = numerators / denominators
    means = np.add.reduceat(numerators, first_rows) / np.add.reduceat(denominators, first_rows)
    minima = np.minimum.reduceat(ratios, first_rows)
    maxima = np.maximum.reduceat(ratios, first_rows)
    return Curve(positions[last_rows], means, minima, maxima)


def compute_loss_curve(table: Numbers) -> Curve:
    """Return the loss curve, averaged over groups of steps, from a table of shape [steps, 5]."""
    return average_step_groups(table[:, :3], table[:, 3], np.ones(len(table)))


def compute_speed_curve(table: Numbers) -> Curve:
    """Return the curve of samples per second. Steps that follow an evaluation or a restart are excluded."""
    samples = np.diff(table[:, 1])
    seconds = np.diff(table[:, 2])
    is_counted = (table[1:, 4] == 0) & (seconds > 0)
    positions = table[1:, :3][is_counted]
    return average_step_groups(positions, samples[is_counted], seconds[is_counted])
