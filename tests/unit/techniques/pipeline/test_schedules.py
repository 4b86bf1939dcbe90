"""Schedules are complete, free of deadlocks and as short as in the papers; custom schedules are checked."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from common.system.errors import UserError
from common.techniques.pipeline import schedules
from common.techniques.pipeline.custom_schedules import check_schedule
from common.techniques.pipeline.schedules import (
    Action,
    Schedule,
    compute_bubble,
    format_timeline,
    simulate_schedule,
)
from configs.pipeline import V_SCHEDULES, PipelineConfig
from tests.harness.commands.refusals import expect_refusal
from tests.harness.repository import ROOT

RANKS = (1, 2, 3, 4, 8)
STAGES_PER_RANK = (1, 2, 3)
MICROBATCHES = (1, 2, 4, 7, 8, 16)
SIZES = list(itertools.product(RANKS, STAGES_PER_RANK, MICROBATCHES))


@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_every_schedule_is_complete_and_has_no_deadlock(name: str) -> None:
    for ranks, stages_per_rank, microbatches in SIZES:
        stages = ranks * stages_per_rank
        stage_ranks = [stage % ranks for stage in range(stages)]
        if name in V_SCHEDULES:
            stage_ranks = [*range(ranks), *reversed(range(ranks))]
        if stages != len(stage_ranks) or (name == "dualpipev" and microbatches < stages):
            continue
        plan = schedules.SCHEDULES[name](ranks, stages, microbatches)
        check_schedule(plan, stage_ranks, microbatches)
        assert schedules.list_stage_ranks(plan) == stage_ranks


def simulate_bubble(plan: Schedule, stages: int) -> float:
    return compute_bubble(simulate_schedule(plan, stages))


@pytest.mark.parametrize("ranks, microbatches", [(2, 1), (2, 4), (3, 6), (4, 8), (8, 32)])
def test_bubbles_are_those_of_the_papers(ranks: int, microbatches: int) -> None:
    sizes = (ranks, ranks, microbatches)  # one stage per rank
    bubble = (ranks - 1) / (microbatches + ranks - 1)
    assert simulate_bubble(schedules.make_gpipe_schedule(*sizes), ranks) == pytest.approx(bubble)
    assert simulate_bubble(schedules.SCHEDULES["1f1b"](*sizes), ranks) == pytest.approx(bubble)
    assert simulate_bubble(schedules.make_naive_schedule(*sizes), ranks) == pytest.approx(1 - 1 / ranks)


def compute_idle_time(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> float:
    """Return the idle time of a rank, in units of one forward."""
    stages = ranks * stages_per_rank
    timeline = simulate_schedule(schedules.SCHEDULES[name](ranks, stages, microbatches), stages)
    return compute_bubble(timeline) * schedules.compute_makespan(timeline)


@pytest.mark.parametrize("ranks, microbatches", [(2, 4), (2, 7), (3, 6), (4, 8), (8, 32)])
@pytest.mark.parametrize("stages_per_rank", [2, 3])
def test_stages_per_rank_divide_the_bubble_of_interleaved_1f1b(
    ranks: int, microbatches: int, stages_per_rank: int
) -> None:
    """The bubble is (p - 1) / v of the time of a microbatch (arXiv 2104.04473, section 2.2), which is 3 v forwards."""
    sizes = (ranks, ranks * stages_per_rank, microbatches)
    bubble = (ranks - 1) / (stages_per_rank * microbatches + ranks - 1)
    plan = schedules.SCHEDULES["interleaved_1f1b"](*sizes)
    assert simulate_bubble(plan, ranks * stages_per_rank) == pytest.approx(bubble)


@pytest.mark.parametrize("ranks, microbatches", [(2, 4), (3, 6), (4, 8), (8, 32)])
def test_split_backwards_shorten_the_bubble_to_one_forward_per_following_rank(ranks: int, microbatches: int) -> None:
    """ZB-H1 has a bubble of (p - 1) (F + I - W) instead of (p - 1) (F + I + W) (arXiv 2401.10241, table 1)."""
    assert compute_idle_time("1f1b", ranks, 1, microbatches) == pytest.approx(3 * (ranks - 1))
    assert compute_idle_time("zero_bubble", ranks, 1, microbatches) == pytest.approx(ranks - 1)
    # two stages per rank halve the duration of a forward
    assert compute_idle_time("dualpipev", ranks, 2, 2 * microbatches) == pytest.approx(ranks - 1)


@pytest.mark.parametrize("ranks, microbatches", [(2, 4), (3, 6), (4, 8), (8, 32)])
def test_with_zbv_no_rank_is_idle_between_its_first_and_its_last_action(ranks: int, microbatches: int) -> None:
    stages = 2 * ranks
    timeline = simulate_schedule(schedules.SCHEDULES["zbv"](ranks, stages, microbatches), stages)
    for rank, spans in enumerate(timeline):
        assert spans[0].start == rank
        assert spans[-1].end - spans[0].start == 6 * microbatches


def count_stored_microbatches(actions: list[Action]) -> int:
    """Return the largest number of microbatches between their forward and the end of their backward."""
    stored = 0
    maximum = 0
    for action in actions:
        stored += {"F": 1, "I": 0}.get(action.kind, -1)
        maximum = max(maximum, stored)
    return maximum


@pytest.mark.parametrize("ranks, microbatches", [(2, 8), (4, 4), (4, 16)])
def test_1f1b_stores_at_most_one_microbatch_per_following_stage(ranks: int, microbatches: int) -> None:
    plan = schedules.SCHEDULES["1f1b"](ranks, ranks, microbatches)
    for rank, actions in enumerate(plan):
        assert count_stored_microbatches(actions) == min(microbatches, ranks - rank)
    for actions in schedules.make_gpipe_schedule(ranks, ranks, microbatches):
        assert count_stored_microbatches(actions) == microbatches


@pytest.mark.parametrize("ranks, microbatches", [(2, 8), (4, 16)])
def test_no_zero_bubble_schedule_stores_more_than_the_first_rank_of_1f1b(ranks: int, microbatches: int) -> None:
    for actions in schedules.SCHEDULES["zero_bubble"](ranks, ranks, microbatches):
        assert count_stored_microbatches(actions) == ranks
    for actions in schedules.SCHEDULES["zbv"](ranks, 2 * ranks, microbatches):
        assert count_stored_microbatches(actions) == 2 * ranks  # of half as many layers


def test_two_stages_per_rank_shorten_the_bubble_of_gpipe() -> None:
    one_stage_bubble = simulate_bubble(schedules.make_gpipe_schedule(4, 4, 8), 4)
    two_stages_bubble = simulate_bubble(schedules.make_gpipe_schedule(4, 8, 8), 8)
    assert two_stages_bubble < one_stage_bubble


def test_the_timeline_shows_the_microbatch_of_each_rank_over_time() -> None:
    lines = format_timeline(simulate_schedule(schedules.make_gpipe_schedule(2, 2, 2), 2), width=9)
    assert lines == ["01...aabb", ".01aabb.."]


def test_the_timeline_distinguishes_the_two_parts_of_a_backward() -> None:
    plan = [[Action(kind, 0, 1) for kind in "FIW"]]
    assert format_timeline(simulate_schedule(plan, 1), width=3) == ["1bB"]


def write_schedule(tmp_path: Path, body: str, function: str = "mine") -> PipelineConfig:
    """Write a custom schedule with this function body, and return a config that refers to `function` in its file."""
    file = tmp_path / "custom.py"
    file.write_text("def mine(ranks, stages, microbatches):\n" + body)
    return PipelineConfig(stages=2, microbatches=2, schedule=f"{file}:{function}")


def test_a_custom_schedule_is_loaded(tmp_path: Path) -> None:
    body = """    order = range(microbatches)
    return [[("F", p, m) for m in order] + [("B", p, m) for m in reversed(order)] for p in range(ranks)]\n"""
    plan = schedules.make_schedule(write_schedule(tmp_path, body))
    assert plan[1] == [Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 1), Action("B", 1, 0)]


def test_a_custom_schedule_may_split_backwards(tmp_path: Path) -> None:
    body = """    order = range(microbatches)
    first_rank = [("F", 0, m) for m in order] + [("B", 0, m) for m in order]
    return [first_rank, [(kind, 1, m) for m in order for kind in "FIW"]]\n"""
    plan = schedules.make_schedule(write_schedule(tmp_path, body))
    assert plan[1][:4] == [Action("F", 1, 0), Action("I", 1, 0), Action("W", 1, 0), Action("F", 1, 1)]


VALID_ACTIONS_OF_RANK_1 = '[("F", 1, 0), ("F", 1, 1), ("B", 1, 0), ("B", 1, 1)]'


DEADLOCK = (
    "deadlock: on rank 0, the backward of microbatch 0 on stage 0 waits for the backward of microbatch 0 on stage 1, "
    "which never completes"
)
INVALID_ACTIONS = {
    '[("F", 0, 0), ("F", 0, 1), ("B", 0, 0)]': "rank 0 never executes the backward of microbatch 1 on stage 0",
    '[("F", 0, 0), ("F", 0, 0)]': "rank 0 executes the forward of microbatch 0 on stage 0 twice",
    '[("F", 0, 0), ("I", 0, 0), ("B", 0, 0)]': "rank 0 executes the backward of microbatch 0 on stage 0 twice",
    '[("F", 0, 0), ("B", 0, 0), ("W", 0, 0)]': "the weight gradient of microbatch 0 on stage 0 twice, because B",
    '[("F", 0, 0), ("I", 0, 0)]': "rank 0 never executes the weight gradient of microbatch 0 on stage 0",
    '[("F", 0, 0), ("W", 0, 0)]': "rank 0 never executes the backward of microbatch 0 on stage 0",
    '[("F", 1, 0)]': "invalid action ('F', 1, 0) on rank 0",
    '[("F", 0, 0), ("X", 0, 0)]': "invalid action ('X', 0, 0) on rank 0",
    '[("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1)]': DEADLOCK,
}


@pytest.mark.parametrize("actions_of_rank_0, message", INVALID_ACTIONS.items())
def test_an_invalid_schedule_is_refused_with_the_invalid_action(
    tmp_path: Path, actions_of_rank_0: str, message: str
) -> None:
    settings = write_schedule(tmp_path, f"    return [{actions_of_rank_0}, {VALID_ACTIONS_OF_RANK_1}]\n")
    with expect_refusal(message):
        schedules.make_schedule(settings)


RETURN_TYPE = (
    "function(ranks, stages, microbatches) must return, for each rank, a list of tuples (pass, stage, microbatch), "
    "where pass is 'F', 'B', 'I' or 'W'"
)


ERRORS_OF_SCHEDULES = {
    "    return [[]]": ":1: a schedule must have one list of actions per rank (got 1 list for 2 ranks)",
    "    return 3": f":1: 'int' object is not iterable; {RETURN_TYPE}",
    "    return [['F', 0]]": f":1: {RETURN_TYPE}",
    "    return ]": ":2: SyntaxError: unmatched ']'",
    "    order = x": ":2: NameError: name 'x' is not defined",
    "    return [[] for _ in range(2 // 0)]": ":2: ZeroDivisionError: integer division or modulo by zero",
    "    yield []\n    raise KeyError('a\\nb')": ":3: KeyError: 'a\\nb'",
    "    raise ValueError('one\\ntwo')": ":2: ValueError: one",
    "    assert not stages": ":2: AssertionError",
    "    raise SystemExit": ":2: SystemExit",
    "    return pick(stages)\n\ndef pick(count):\n    return [0][count]": ":5: IndexError: list index out of range",
    "    import json\n    json.loads('{')": ":3: JSONDecodeError: Expecting property name",
    "    return []\n1 / 0": ":3: ZeroDivisionError: division by zero",
    "    return []\nraise SystemExit(0)": ":3: SystemExit: 0",
    "    return []\nmine = lambda: 0": f":3: <lambda>() takes 0 positional arguments but 3 were given; {RETURN_TYPE}",
    "    return []\nmine = dict": f": dict expected at most 1 argument, got 3; {RETURN_TYPE}",
    "    return []\n\0": ": cannot contain null bytes",
}


@pytest.mark.parametrize("body, expected", ERRORS_OF_SCHEDULES.items())
def test_an_error_of_a_custom_schedule_has_file_and_line(tmp_path: Path, body: str, expected: str) -> None:
    settings = write_schedule(tmp_path, f"{body}\n")
    with pytest.raises(UserError) as caught:
        schedules.make_schedule(settings)
    file = tmp_path / "custom.py"
    line, _, message = expected.partition(": ")
    text = str(caught.value)
    assert text.startswith(f"schedule={settings.schedule}: {file}{line}: "), text
    assert message in text
    assert "\n" not in text


def test_a_missing_function_is_refused_with_the_existing_ones(tmp_path: Path) -> None:
    settings = write_schedule(tmp_path, "    return []\n", function="yours")
    with pytest.raises(UserError, match="no function 'yours'; it has mine"):
        schedules.make_schedule(settings)


def test_a_missing_file_is_refused_with_the_names_of_schedules() -> None:
    with pytest.raises(UserError, match=r"there is no file .*nowhere\.py; .* or use one of naive, gpipe, 1f1b"):
        schedules.make_schedule(PipelineConfig(schedule="nowhere.py:f"))


def draw(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "common.techniques.pipeline", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_schedule_that_cannot_be_drawn_is_refused() -> None:
    process = draw("zbv", "2", "4")
    assert process.returncode == 2
    assert process.stderr.startswith("error: schedule=zbv needs two stages per rank; set stages_per_process=2")


def test_the_package_prints_a_schedule() -> None:
    process = draw("gpipe", "2", "4")
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[:2] == ["rank 0 |0123...aabbccdd|", "rank 1 |.0123aabbccdd..|"]
    assert "idle share 20.0%" in process.stdout
