"""The numbers at the end of a run, from time stamps whose answer is known."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from common.measure import tables
from common.measure.memory import read_peak_memory, reset_peak_memory
from common.techniques.pipeline import report, schedules
from common.techniques.pipeline.schedules import Action, Span, simulate_schedule


def test_idle_shares_of_a_known_step() -> None:
    step = [
        [Span(Action("F", 0, 0), 0.0, 1.0), Span(Action("B", 0, 0), 3.0, 4.0)],
        [Span(Action("F", 1, 0), 1.0, 2.0), Span(Action("B", 1, 0), 2.0, 3.0)],
    ]
    assert report.compute_idle_shares([step]) == pytest.approx([0.5, 0.5])
    late = [[*step[0], Span(Action("F", 0, 1), 7.0, 8.0)], step[1]]
    assert report.compute_idle_shares([step, late, late]) == pytest.approx([1 - 3 / 8, 1 - 2 / 8])
    assert report.select_median_step([step, late, late]) == late


def test_an_ideal_run_shows_the_ideal_bubble_and_one_line_a_stage() -> None:
    plan = schedules.make_gpipe_schedule(2, 4, 4)
    spans = simulate_schedule(plan, 4)
    found = report.PipelineReport.from_spans([[mine] * 3 for mine in spans], plan, 4)
    assert sum(found.idle_shares) / 2 == pytest.approx(found.ideal_bubble)
    lines = found.rows()["pipeline"].splitlines()[1:-1]
    assert [line.split(" |")[0] for line in lines] == ["stage 0", "stage 1", "stage 2", "stage 3"]
    timeline = found.result().measured["timeline"]
    assert len(timeline) == 32 and timeline[0] == {
        "rank": 0, "kind": "F", "stage": 0, "microbatch": 0, "start": 0.0, "end": 1.0,
    }  # fmt: skip


def test_the_legend_tells_of_capitals_where_there_are_some() -> None:
    for kinds, told in (("FB", False), ("FIW", True)):
        plan = [[Action(kind, 0, 0) for kind in kinds]]
        found = report.PipelineReport(0.0, [0.0], simulate_schedule(plan, 1))
        assert ("(uppercase letter: gradient of the weights)" in found.rows()["pipeline"]) is told


def test_a_table_keeps_lines_of_a_value_in_its_column() -> None:
    assert tables.format_table({"a": "1", "long name": "2\n3"}) == "  a          1\n  long name  2\n             3"


def test_the_peak_of_memory_begins_anew() -> None:
    def check() -> None:
        cpu, size = torch.device("cpu"), 300_000_000
        before = read_peak_memory(cpu)
        large = torch.ones(size, dtype=torch.uint8)
        assert read_peak_memory(cpu) > before + 0.9 * size
        del large
        reset_peak_memory(cpu)
        assert read_peak_memory(cpu) < before + 0.1 * size

    child = multiprocessing.get_context("fork").Process(target=check)  # its peak begins with what it has
    child.start()
    child.join()
    assert child.exitcode == 0
