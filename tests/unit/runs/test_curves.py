"""common/runs/compare/metric_curves.py: what is drawn of a run, whatever its length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.runs.compare import metric_curves
from tests.harness.made_runs import Made


def rows(losses: list[float | None], seconds: float = 0.1) -> list[dict[str, Any]]:
    return [
        {"global_step": i, "samples": 10 * i, "time": seconds * i, "loss": loss} for i, loss in enumerate(losses, 1)
    ]


def test_a_short_run_is_drawn_as_it_is() -> None:
    drawn = metric_curves.read_curves(rows([3.0, 2.0, 1.0]))
    assert drawn.loss.value.tolist() == drawn.loss.low.tolist() == drawn.loss.high.tolist() == [3, 2, 1]
    assert drawn.loss.positions.tolist() == [[1, 10, 0.1], [2, 20, 0.2], [3, 30, pytest.approx(0.3)]]
    assert drawn.speed.value == pytest.approx([100, 100])  # the first step has none before it


def test_a_long_one_is_thinned_and_loses_no_peak() -> None:
    losses = np.linspace(2, 1, 10_007)
    losses[5000] = 50
    drawn = metric_curves.read_curves(rows(list(losses)))
    for curve in (drawn.loss, drawn.speed):
        assert 0.9 * metric_curves.MAX_POINTS < len(curve) <= metric_curves.MAX_POINTS
    assert drawn.loss.positions[-1, 0] == 10_007
    assert drawn.loss.positions[:8, 0].tolist() == list(range(1, 9))  # a logarithmic axis shows each of them
    counts = np.diff(np.concatenate([[0], drawn.loss.positions[:, 0]]))
    assert counts.max() <= 32 and (drawn.loss.value * counts).sum() == pytest.approx(losses.sum())
    assert max(drawn.loss.high) == 50 and min(drawn.loss.low) == 1


def test_the_time_of_evaluations_is_no_step() -> None:
    own = rows([1.0] * 6)
    for row in own[3:]:
        row["time"] += 60
    own.insert(3, {"global_step": 3, "samples": 30, "time": 60.3, "test_accuracy": 0.5})
    drawn = metric_curves.read_curves(own)
    assert drawn.speed.value == pytest.approx([100] * 4)  # all but the first and the one after the evaluation
    assert drawn.tests["test_accuracy"].value.tolist() == [0.5]
    assert drawn.tests["test_accuracy"].positions.tolist() == [[3, 30, 60.3]]


def test_the_time_between_two_starts_is_no_step() -> None:
    own = rows([1.0] * 6)
    for row in own[3:]:
        row["time"] += 60
    own.append({"global_step": [6], "samples": 60, "time": 61, "loss": 1.0})
    assert min(metric_curves.read_curves(own[:-1]).speed.value) < 1
    assert metric_curves.read_curves(own, {3}).speed.value == pytest.approx(
        [100] * 4
    )  # all but the first of each start


def test_a_loss_that_is_no_number_is_a_gap() -> None:
    drawn = metric_curves.read_curves(rows([1.0, None, 1.0]))
    assert np.isnan(drawn.loss.value).tolist() == [False, True, False]


def test_nothing_is_drawn_of_nothing() -> None:
    drawn = metric_curves.read_curves([])
    assert len(drawn.loss) == len(drawn.speed) == 0 and not drawn.tests


def test_each_step_of_a_restarted_run_is_drawn_once(tmp_path: Path) -> None:
    drawn = metric_curves.read_curves(Made(steps=100, attempts=4).write(tmp_path).read_rows())
    assert drawn.loss.positions[:, 0].tolist() == list(range(1, 101))
    assert drawn.tests["test_loss"].positions[:, 0].tolist() == [20, 40, 60, 80, 100]
