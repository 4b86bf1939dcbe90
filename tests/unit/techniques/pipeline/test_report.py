"""The report of a pipelined run, from timestamps with a known result."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from common.techniques.pipeline import report, schedules
from common.techniques.pipeline.schedules import Action, Span, simulate_schedule
from tests.harness.commands.processes import Settings, run_experiment


def test_idle_shares_are_those_of_the_median_step() -> None:
    first_stage = [Span(Action("F", 0, 0), 0.0, 1.0), Span(Action("B", 0, 0), 3.0, 4.0)]
    second_stage = [Span(Action("F", 1, 0), 1.0, 2.0), Span(Action("B", 1, 0), 2.0, 3.0)]
    step = [first_stage, second_stage]
    assert report.compute_idle_shares([step]) == pytest.approx([0.5, 0.5])

    long_step = [[*first_stage, Span(Action("F", 0, 1), 7.0, 8.0)], second_stage]
    steps = [step, long_step, long_step]
    assert report.compute_idle_shares(steps) == pytest.approx([1 - 3 / 8, 1 - 2 / 8])
    assert report.select_median_step(steps) == long_step


def test_an_ideal_run_has_the_ideal_bubble_and_a_line_per_stage() -> None:
    plan = schedules.make_gpipe_schedule(2, 4, 4)
    spans = simulate_schedule(plan, 4)
    pipeline_report = report.PipelineReport.from_spans([[stage_spans] * 3 for stage_spans in spans], plan, 4)
    assert sum(pipeline_report.idle_shares) / 2 == pytest.approx(pipeline_report.ideal_bubble)

    lines = pipeline_report.rows()["pipeline"].splitlines()[1:-1]
    labels = [line.split(" |")[0] for line in lines]
    assert labels == ["stage 0", "stage 1", "stage 2", "stage 3"]

    timeline = pipeline_report.result().measured["timeline"]
    assert len(timeline) == 32
    assert timeline[0] == {"rank": 0, "kind": "F", "stage": 0, "microbatch": 0, "start": 0.0, "end": 1.0}


def test_a_single_stage_has_no_idle_share() -> None:
    plan = schedules.make_gpipe_schedule(1, 1, 2)
    (spans,) = simulate_schedule(plan, 1)
    pipeline_report = report.PipelineReport.from_spans([[spans]], plan, 1)
    assert pipeline_report.result().measured["idle_share"] == []
    assert "pipeline" in pipeline_report.rows()
    assert "idle share" not in pipeline_report.rows()


@pytest.mark.parametrize("kinds, has_uppercase_letters", [("FB", False), ("FIW", True)])
def test_the_legend_explains_uppercase_letters_if_there_are_any(kinds: str, has_uppercase_letters: bool) -> None:
    plan = [[Action(kind, 0, 0) for kind in kinds]]
    pipeline_report = report.PipelineReport(0.0, [0.0], simulate_schedule(plan, 1))
    legend = "(uppercase letter: gradient of the weights)"
    assert (legend in pipeline_report.rows()["pipeline"]) == has_uppercase_letters


def test_the_title_of_a_timeline_has_model_batch_ranks_and_schedule(tmp_path: Path, digits: Settings) -> None:
    settings = ("plot=true", "steps=3", "batch=16", "schedule=1f1b")
    finished_run = run_experiment("mnist_pipeline", *digits, *settings, runs=tmp_path)
    image = Image.open(finished_run.folder.path / "timeline.png")
    model = "SimpleNN (width 128, depth 2), batch 16"
    schedule = "1f1b (built-in engine), 2 stages, 4 microbatches"
    assert image.info["Title"] == f"one step of {model}, 2 ranks: {schedule}"
