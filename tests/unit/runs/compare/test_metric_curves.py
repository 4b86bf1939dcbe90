"""The curves of a run, which are thinned if the run is long."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.runs.compare import metric_curves
from tests.harness.runs.synthetic_runs import SyntheticRun

STEP_SECONDS = 0.1
PAUSE_SECONDS = 60


def make_rows(losses: Sequence[float | None]) -> list[dict[str, Any]]:
    rows = []
    for step, loss in enumerate(losses, 1):
        rows.append({"global_step": step, "samples": 10 * step, "time": STEP_SECONDS * step, "loss": loss})
    return rows


def make_rows_with_pause() -> list[dict[str, Any]]:
    """Return the rows of six steps with a pause after step 3."""
    rows = make_rows([1.0] * 6)
    for row in rows[3:]:
        row["time"] += PAUSE_SECONDS
    return rows


def test_the_curves_of_a_short_run_have_all_points() -> None:
    curves = metric_curves.read_curves(make_rows([3.0, 2.0, 1.0]))
    loss = curves.steps["loss"]
    for losses in (loss.value, loss.low, loss.high):
        assert losses.tolist() == [3, 2, 1]
    assert loss.positions.tolist() == [[1, 10, 0.1], [2, 20, 0.2], [3, 30, pytest.approx(0.3)]]
    assert curves.steps["samples_per_second"].value == pytest.approx([100, 100])  # no step precedes the first step
    assert curves.steps["step_time"].value == pytest.approx([0.1, 0.1])
    assert curves.last_step == 3


def test_every_logged_value_has_a_curve() -> None:
    rows = make_rows([1.0] * 4)
    for row in rows:
        row |= {"loss/penalty": 0.5, "samples_per_second": 7.0}
    rows[2]["sparsity"] = 0.3
    curves = metric_curves.read_curves(rows).steps
    assert set(curves) == {"loss", "loss/penalty", "samples_per_second", "step_time", "sparsity"}
    assert curves["samples_per_second"].value.tolist() == [7] * 4, "the logged values replace computed ones"
    assert curves["sparsity"].positions.tolist() == [[3, 30, pytest.approx(0.3)]]


def test_a_measurement_without_loss_has_no_speed() -> None:
    rows = make_rows([1.0, 2.0])
    for row in rows:
        row["bytes"] = row.pop("loss")
    assert list(metric_curves.read_curves(rows).steps) == ["bytes"]


def test_runs_are_averaged_at_each_step() -> None:
    runs = [metric_curves.read_curves(make_rows(losses)) for losses in ([4.0, 2.0, 1.0], [2.0, 4.0])]
    mean = metric_curves.average_runs(runs).steps["loss"]
    assert mean.value.tolist() == [3, 3, 1]
    assert mean.low.tolist() == [2, 2, 1]
    assert mean.high.tolist() == [4, 4, 1]
    assert mean.newest_value == 2.5
    assert mean.positions == pytest.approx(runs[0].steps["loss"].positions)


def test_curves_with_different_points_are_interpolated() -> None:
    every_step = metric_curves.read_curves(make_rows([0.0, 1.0, 2.0, None]))
    rows = make_rows([0.0, 9.0, 4.0, 6.0])
    del rows[1]
    mean = metric_curves.average_runs([every_step, metric_curves.read_curves(rows)]).steps["loss"]
    assert mean.high.tolist() == [0, 2, 4, 6]
    assert mean.low.tolist() == [0, 1, 2, 6]


def test_the_curves_of_a_long_run_are_thinned_and_keep_peaks() -> None:
    losses = np.linspace(2, 1, 10_007)
    losses[5000] = 50
    curves = metric_curves.read_curves(make_rows(list(losses)))
    loss = curves.steps["loss"]
    for curve in curves.steps.values():
        assert 0.9 * metric_curves.MAX_POINTS < len(curve) <= metric_curves.MAX_POINTS

    steps = curves.steps["loss"].positions[:, 0]
    assert steps[-1] == 10_007
    assert steps[:8].tolist() == list(range(1, 9))  # a logarithmic axis shows each of them
    steps_per_point = np.diff(np.concatenate([[0], steps]))
    assert steps_per_point.max() <= 32
    assert (loss.value * steps_per_point).sum() == pytest.approx(losses.sum())
    assert max(loss.high) == 50
    assert min(loss.low) == 1


def test_the_newest_value_of_a_long_run_is_not_a_mean() -> None:
    losses: list[float | None] = list(np.linspace(2, 1, 10_007))
    curve = metric_curves.read_curves(make_rows(losses)).steps["loss"]
    assert curve.newest_value == 1
    assert curve.value[-1] > 1
    losses[-1] = None
    assert metric_curves.read_curves(make_rows(losses)).steps["loss"].newest_value == losses[-2]
    assert metric_curves.read_curves(make_rows([None])).steps["loss"].newest_value is None


def test_evaluations_do_not_reduce_the_speed() -> None:
    rows = make_rows_with_pause()
    rows.insert(3, {"global_step": 3, "samples": 30, "time": 60.3, "test_accuracy": 0.5})
    curves = metric_curves.read_curves(rows)
    assert curves.steps["samples_per_second"].value == pytest.approx(
        [100] * 4
    )  # without the first step and the step after the evaluation
    accuracy = curves.tests["test_accuracy"]
    assert accuracy.value.tolist() == [0.5]
    assert accuracy.positions.tolist() == [[3, 30, 60.3]]


def test_the_time_between_two_attempts_does_not_reduce_the_speed() -> None:
    rows = make_rows_with_pause()
    assert min(metric_curves.read_curves(rows).steps["samples_per_second"].value) < 1
    rows.append({"global_step": [6], "samples": 60, "time": 61, "loss": 1.0})
    speed = metric_curves.read_curves(rows, {3}).steps["samples_per_second"]
    assert speed.value == pytest.approx([100] * 4)  # without the first step of each attempt


def test_a_missing_loss_is_a_gap() -> None:
    curves = metric_curves.read_curves(make_rows([1.0, None, 1.0]))
    assert np.isnan(curves.steps["loss"].value).tolist() == [False, True, False]


def test_a_run_without_rows_has_empty_curves() -> None:
    curves = metric_curves.read_curves([])
    assert not curves.steps
    assert not curves.tests
    assert curves.last_step == 0


def test_the_curves_of_a_restarted_run_have_each_step_once(tmp_path: Path) -> None:
    folder = SyntheticRun(steps=100, attempts=4).write(tmp_path)
    curves = metric_curves.read_curves(folder.read_rows())
    assert curves.steps["loss"].positions[:, 0].tolist() == list(range(1, 101))
    assert curves.tests["test_loss"].positions[:, 0].tolist() == [20, 40, 60, 80, 100]
