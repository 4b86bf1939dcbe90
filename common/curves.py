"""The curves of a run, out of its metrics: thinned to what a screen can show, whatever its length. Imports no torch.

A point of a training curve is the mean over some consecutive steps, with the lowest and the highest of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

POINTS = 400  # of one curve
AXES = ("global_step", "samples", "time")
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
class Curves:
    """What is drawn of a run."""

    loss: Curve
    speed: Curve
    """Samples a second; evaluations and the time between two starts are left out."""
    tests: dict[str, Curve] = field(default_factory=dict)
    """Evaluations by name, such as test_accuracy."""


def read(rows: Iterable[dict[str, Any]]) -> Curves:
    """The curves of a run's rows of metrics. Rows that are not as they should be are left out."""
    steps: list[tuple[float, ...]] = []  # step, samples, time, loss, whether an evaluation or another start came before
    tests: dict[str, list[tuple[float, ...]]] = {}
    broken = True
    for row in rows:
        try:
            at = (row["global_step"], row["samples"], row["time"])
            if "loss" in row:
                value = row["loss"]
                steps.append((*at, np.nan if value is None else value, broken))
                broken = False
                continue
        except KeyError:
            continue
        broken = True
        for name, value in row.items():
            if name not in AXES and isinstance(value, int | float):
                tests.setdefault(name, []).append((*at, value))
    table = numbers(steps, 5)
    found = {name: numbers(values, 4) for name, values in tests.items()}
    evaluations = {name: Curve(own[:, :3], own[:, 3], own[:, 3], own[:, 3]) for name, own in found.items()}
    return Curves(means(table), speeds(table), evaluations)


def numbers(rows: list[tuple[float, ...]], width: int) -> Numbers:
    """[rows, width]; without the rows that hold something else than numbers."""
    try:
        return np.array(rows, dtype=np.float64).reshape(len(rows), width)
    except (TypeError, ValueError):
        sound = [row for row in rows if all(isinstance(value, int | float) for value in row)]
        return np.array(sound, dtype=np.float64).reshape(len(sound), width)


def edges(count: int) -> NDArray[np.int64]:
    """Where the groups of consecutive steps begin and end."""
    return np.unique(np.linspace(0, count, min(count, POINTS) + 1).astype(np.int64))


def means(table: Numbers) -> Curve:
    """The loss, by groups of steps; each point stands at the last step of its group."""
    bounds = edges(len(table))
    first, last = bounds[:-1], bounds[1:] - 1
    if not len(first):
        return Curve(np.empty((0, 3)), np.empty(0), np.empty(0), np.empty(0))
    loss = table[:, 3]
    mean = np.add.reduceat(loss, first) / np.diff(bounds)
    return Curve(table[last, :3], mean, np.minimum.reduceat(loss, first), np.maximum.reduceat(loss, first))


def speeds(table: Numbers) -> Curve:
    """Samples a second, by groups of steps; a step that came after something else is not counted."""
    found = []
    for first, end in pairwise(edges(len(table))):
        part = table[max(0, first - 1) : end]
        samples, seconds = np.diff(part[:, 1]), np.diff(part[:, 2])
        counted = (part[1:, 4] == 0) & (seconds > 0)
        if counted.any():
            each = samples[counted] / seconds[counted]
            mean = samples[counted].sum() / seconds[counted].sum()
            found.append((*table[end - 1, :3], mean, each.min(), each.max()))
    own = numbers(found, 6)
    return Curve(own[:, :3], own[:, 3], own[:, 4], own[:, 5])
