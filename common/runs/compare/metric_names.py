"""Titles, units and groups of metrics on the comparison page. This module does not import torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

TRAINING = "training"
EVALUATION = "evaluation"
SPEED = "speed"
SPEED_METRICS = ("samples_per_second", "step_time")
FIRST_METRICS = ("loss", "learning_rate", "gradient_norm", "test_accuracy", "test_loss", *SPEED_METRICS)
"""Metrics that are shown before all other metrics of their group."""
TITLES = {"loss": "training loss", "samples_per_second": "samples/s"}
"""Titles of metrics that differ from the metric's name."""
UNITS = (
    (r"step_time", "ms", 1000.0),
    (r"samples_per_second", "", 1.0),  # the title contains the unit
    (r"(.*_)?(accuracy|sparsity|share)", "%", 1.0),
    (r"(.*_)?(seconds|time)", "s", 1.0),
    (r"(.*_)?bytes(_.*)?", "bytes", 1.0),
    (r"(.*_)?mb", "MB", 1.0),
)
"""Pattern of the last part of metric names, the unit of these metrics, and the factor that converts to this unit."""


@dataclass(frozen=True)
class MetricLabel:
    """How the page names a metric."""

    title: str
    unit: str
    """Unit of the values, or an empty string. Values with the unit `%` are shares from 0 to 1."""
    factor: float
    """Factor by which the logged values are multiplied."""
    group: str
    """Heading above the chart."""


def label_metric(name: str, is_evaluation: bool) -> MetricLabel:
    """Return the title, unit and group of a metric.

    The part of a name before the first slash is the group. Names without a slash belong to the group of the training,
    the evaluation or the speed.
    """
    prefix, _, last_part = name.rpartition("/")
    group = prefix or (EVALUATION if is_evaluation else TRAINING)
    if name in SPEED_METRICS:
        group = SPEED
    title = TITLES.get(name, last_part.replace("_", " "))
    for pattern, unit, factor in UNITS:
        if re.fullmatch(pattern, last_part):
            return MetricLabel(title, unit, factor, group)
    return MetricLabel(title, "", 1.0, group)


def compute_metric_order(name: str) -> int:
    """Return the position of a metric within its group. Other metrics follow in the order in which they were logged."""
    return FIRST_METRICS.index(name) if name in FIRST_METRICS else len(FIRST_METRICS)
