"""The data of the charts of the comparison page."""

from __future__ import annotations

import numpy as np
import pytest

from common.runs.compare import compare_page
from common.runs.compare.compare_page import ComparedRun, CurveEncoder
from common.runs.compare.metric_curves import Curve, RunCurves

PART_OF_RUN = 'value="3" checked'


def make_curve(steps: int, value: float) -> Curve:
    """Return a curve with the same value at each step."""
    axis = np.arange(1.0, steps + 1)
    values = np.full(steps, value)
    return Curve(np.column_stack([axis, axis, axis]), values, values, values, value)


def make_run(steps: int, state: str = "finished", **metrics: float) -> ComparedRun:
    """Return a run whose training metrics have constant values."""
    curves = {name.replace("__", "/"): make_curve(steps, value) for name, value in metrics.items()}
    return ComparedRun(
        "run", "mnist_pipeline", "0000", "0000", state, RunCurves({"loss": make_curve(steps, 1)} | curves), {}, {}
    )


LENGTHS = {
    "similar": ([make_run(300), make_run(100)], False),
    "different": ([make_run(301), make_run(100)], True),
    "failed early": ([make_run(300), make_run(9, "failed")], False),
    "running": ([make_run(300), make_run(9, "running")], False),
    "no steps": ([make_run(300), ComparedRun("run", "x", "1", "1", "finished", RunCurves(), {}, {})], False),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_the_part_of_the_run_is_shown_if_finished_runs_have_different_lengths(name: str) -> None:
    runs, is_relative = LENGTHS[name]
    assert (PART_OF_RUN in compare_page.render_page(runs, [], [], [])) == is_relative


def test_charts_are_grouped_by_the_prefix_of_their_names() -> None:
    runs = [
        make_run(40, step_time=0.002, loss__b=2, gradient_norm=3, learning_rate=4),
        make_run(40, loss__a=5, extra=6),
    ]
    encoder = CurveEncoder()
    groups = compare_page.build_charts(runs, encoder)
    titles = {heading: [chart["title"] for chart in charts] for heading, charts in groups.items()}
    assert titles == {
        "training": ["training loss", "learning rate", "gradient norm", "extra"],
        "loss": ["b", "a"],
        "speed": ["step time"],
    }
    (step_time,) = groups["speed"]
    assert step_time["unit"] == "ms"
    assert step_time["curves"] == [{"run": 0, "at": 0, "y": [2.0] * 40}]
    assert len(encoder.positions) == 1, "all curves have the same points"
    assert [chart["may_smooth"] for chart in groups["training"]] == [True, False, True, True]
    assert [chart["may_log"] for chart in groups["loss"]] == [True, True]
