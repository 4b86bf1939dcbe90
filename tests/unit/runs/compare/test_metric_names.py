"""Titles, units and groups of charts."""

from __future__ import annotations

import pytest

from common.runs.compare.metric_names import MetricLabel, label_metric

LABELS = {
    "loss": MetricLabel("training loss", "", 1, "training"),
    "gradient_norm": MetricLabel("gradient norm", "", 1, "training"),
    "loss/cross_entropy": MetricLabel("cross entropy", "", 1, "loss"),
    "samples_per_second": MetricLabel("samples/s", "", 1, "speed"),
    "step_time": MetricLabel("step time", "ms", 1000, "speed"),
    "exchange/wait_seconds": MetricLabel("wait seconds", "s", 1, "exchange"),
    "bytes_sent": MetricLabel("bytes sent", "bytes", 1, "training"),
    "sparsity": MetricLabel("sparsity", "%", 1, "training"),
}


@pytest.mark.parametrize("name", LABELS)
def test_metrics_of_steps_are_labeled(name: str) -> None:
    assert label_metric(name, is_evaluation=False) == LABELS[name]


def test_metrics_of_evaluations_are_labeled() -> None:
    assert label_metric("test_accuracy", is_evaluation=True) == MetricLabel("test accuracy", "%", 1, "evaluation")
