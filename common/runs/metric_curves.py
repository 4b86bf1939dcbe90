"""Curves of a run's metrics, thinned to what a screen can show, whatever their length. Imports no torch.

A point of a training curve is the mean over some consecutive steps, with the lowest and the highest of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

POINTS, EARLY = 400, 80  # of one curve; of these, for a logarithmic axis, the more the earlier
AXES = ("global_step", "samples", "time")
NO_CURVE = (*AXES, "test_samples")  # the same in every evaluation
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Values along a run. All arrays have the same length."""

    at: Numbers
    """[points, 3]: step, samples, seconds."""
    value: Numbers
    low: Numbers
    high: Numbers

    def __len__(self) -> int:
        return len(self.value)


@dataclass(frozen=True)
class RunCurves:
    """The curves that are drawn of a run."""

    loss: Curve
    speed: Curve
    """Samples a second; evaluations and the time between two starts are left out."""
    tests: dict[str, Curve] = field(default_factory=dict)
    """Evaluations by name, such as test_accuracy."""


def read_curves(rows: Iterable[dict[str, Any]], ends: Collection[int] = ()) -> RunCurves:
    """Return the curves of a run's rows of metrics. Malformed rows are left out.

    `ends` are the last steps of attempts that another one resumed.
    """
    steps: list[tuple[float, ...]] = []  # step, samples, time, loss, whether an evaluation or another start came before
    tests: dict[str, list[tuple[float, ...]]] = {}
    broken = True
    for row in rows:
        try:
            at = (row["global_step"], row["samples"], row["time"])
            if "loss" in row:
                value = row["loss"]
                steps.append((*at, np.nan if value is None else value, broken))
                broken = at[0] in ends
                continue
        except (KeyError, TypeError):
            continue
        broken = True
        for name, value in row.items():
            if name not in NO_CURVE and isinstance(value, int | float):
                tests.setdefault(name, []).append((*at, value))
    table = drop_non_numeric_rows(steps, columns=5)
    found = {name: drop_non_numeric_rows(values, columns=4) for name, values in tests.items()}
    evaluations = {name: Curve(own[:, :3], own[:, 3], own[:, 3], own[:, 3]) for name, own in found.items()}
    return RunCurves(compute_loss_curve(table), compute_speed_curve(table), evaluations)


def drop_non_numeric_rows(rows: list[tuple[float, ...]], columns: int) -> Numbers:
    """Return an array [rows, columns] without the rows that hold anything but numbers."""
    try:
        return np.array(rows, dtype=np.float64).reshape(len(rows), columns)
    except (TypeError, ValueError):
        sound = [row for row in rows if all(isinstance(value, int | float) for value in row)]
        return np.array(sound, dtype=np.float64).reshape(len(sound), columns)


def compute_group_bounds(count: int) -> NDArray[np.int64]:
    """Return the bounds of the groups of consecutive steps, at most POINTS + 1 indices, denser at the start."""
    if count <= POINTS:
        return np.arange(count + 1)
    even, early = np.linspace(0, count, POINTS - EARLY + 1), np.geomspace(1, count, EARLY)
    return np.unique(np.concatenate([even, early]).astype(np.int64))


def average_step_groups(at: Numbers, above: Numbers, below: Numbers) -> Curve:
    """Return sum(above) / sum(below) over groups of consecutive rows; each point is at its group's last row."""
    bounds = compute_group_bounds(len(at))
    first, last = bounds[:-1], bounds[1:] - 1
    if not len(first):
        return Curve(np.empty((0, 3)), np.empty(0), np.empty(0), np.empty(0))
    each, mean = above / below, np.add.reduceat(above, first) / np.add.reduceat(below, first)
    return Curve(at[last], mean, np.minimum.reduceat(each, first), np.maximum.reduceat(each, first))


def compute_loss_curve(table: Numbers) -> Curve:
    """Return the loss, averaged over groups of steps."""
    return average_step_groups(table[:, :3], table[:, 3], np.ones(len(table)))


def compute_speed_curve(table: Numbers) -> Curve:
    """Return samples per second; a step after an evaluation or a restart does not count."""
    samples, seconds = np.diff(table[:, 1]), np.diff(table[:, 2])
    counted = (table[1:, 4] == 0) & (seconds > 0)
    return average_step_groups(table[1:, :3][counted], samples[counted], seconds[counted])
