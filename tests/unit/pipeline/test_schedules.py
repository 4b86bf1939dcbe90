"""Schedules as data: complete, free of deadlock, as short as theory says; custom ones are checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from common.system.errors import UserError
from common.techniques.pipeline import schedules
from common.techniques.pipeline.schedules import (
    Action,
    check_schedule,
    compute_bubble,
    format_timeline,
    simulate_schedule,
)
from configs.pipeline import PipelineConfig
from tests.harness.warm import ROOT

SIZES = [(p, p * each, m) for p in (1, 2, 3, 4, 8) for each in (1, 2, 3) for m in (1, 2, 4, 7, 8)]


@pytest.mark.parametrize("name", schedules.SCHEDULES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_schedule_is_complete_and_ends(name: str, sizes: tuple[int, int, int]) -> None:
    check_schedule(schedules.SCHEDULES[name](*sizes), *sizes)


@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 4), (3, 6), (4, 8), (8, 32)])
def test_bubbles_are_those_of_the_papers(p: int, m: int) -> None:
    bubble = (p - 1) / (m + p - 1)
    assert compute_bubble(simulate_schedule(schedules.make_gpipe_schedule(p, p, m), p)) == pytest.approx(bubble)
    assert compute_bubble(simulate_schedule(schedules.make_1f1b_schedule(p, p, m), p)) == pytest.approx(bubble)
    assert compute_bubble(simulate_schedule(schedules.make_naive_schedule(p, p, m), p)) == pytest.approx(1 - 1 / p)


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 4), (4, 16)])
def test_1f1b_keeps_at_most_as_many_microbatches_as_stages_follow(p: int, m: int) -> None:
    for rank, actions in enumerate(schedules.make_1f1b_schedule(p, p, m)):
        flying = most = 0
        for action in actions:
            flying += 1 if action.kind == "F" else -1
            most = max(most, flying)
        assert most == min(m, p - rank)
    assert max(sum(a.kind == "F" for a in actions) for actions in schedules.make_gpipe_schedule(p, p, m)) == m


def test_two_stages_a_rank_shorten_gpipe() -> None:
    one, two = (
        compute_bubble(simulate_schedule(schedules.make_gpipe_schedule(4, stages, 8), stages)) for stages in (4, 8)
    )
    assert two < one


def test_diagram_shows_who_works_on_what_when() -> None:
    lines = format_timeline(simulate_schedule(schedules.make_gpipe_schedule(2, 2, 2), 2), width=9)
    assert lines == ["01...aabb", ".01aabb.."]


def test_diagram_tells_the_two_parts_of_a_backward_apart() -> None:
    plan = [[Action(kind, 0, 1) for kind in "FIW"]]
    assert format_timeline(simulate_schedule(plan, 1), width=3) == ["1bB"]


def custom(tmp_path: Path, body: str, function: str = "mine") -> PipelineConfig:
    file = tmp_path / "custom.py"
    file.write_text("def mine(ranks, stages, microbatches):\n" + body)
    return PipelineConfig(stages=2, microbatches=2, schedule=f"{file}:{function}")


def test_custom_schedule_is_loaded(tmp_path: Path) -> None:
    body = """    order = range(microbatches)
    return [[("F", p, m) for m in order] + [("B", p, m) for m in reversed(order)] for p in range(ranks)]\n"""
    plan = schedules.make_schedule(custom(tmp_path, body))
    assert plan[1] == [Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 1), Action("B", 1, 0)]


GOOD = '[("F", 1, 0), ("F", 1, 1), ("B", 1, 0), ("B", 1, 1)]'


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            '[("F", 0, 0), ("F", 0, 1), ("B", 0, 0)]',
            GOOD,
            "rank 0 never executes the backward of microbatch 1 on stage 0",
        ),
        ('[("F", 0, 0), ("F", 0, 0)]', GOOD, "rank 0 executes the forward of microbatch 0 on stage 0 twice"),
        ('[("F", 1, 0)]', GOOD, "invalid action ('F', 1, 0) on rank 0"),
        ('[("F", 0, 0), ("X", 0, 0)]', GOOD, "invalid action ('X', 0, 0) on rank 0"),
        (
            '[("F", 0, 0), ("B", 0, 0), ("F", 0, 1), ("B", 0, 1)]',
            GOOD,
            "deadlock: on rank 0, the backward of microbatch 0 on stage 0 waits for the backward of microbatch 0 on "
            "stage 1, which never completes",
        ),
    ],
)
def test_bad_schedules_are_refused_naming_the_action(tmp_path: Path, first: str, second: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        schedules.make_schedule(custom(tmp_path, f"    return [{first}, {second}]\n"))
    assert message in str(caught.value)


RETURNS = (
    "function(ranks, stages, microbatches) must return, for each rank, a list of tuples (pass, stage, microbatch), "
    "where pass is 'F' or 'B'"
)


@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        ("    return [[]]\n", 1, "a schedule must have one list of actions per rank (got 1 list for 2 ranks)"),
        ("    return 3\n", 1, f"'int' object is not iterable; {RETURNS}"),
        ("    return [['F', 0]]\n", 1, RETURNS),
        ("    return ]\n", 2, "SyntaxError: unmatched ']'"),
        ("    order = x\n", 2, "NameError: name 'x' is not defined"),
        ("    return [[] for _ in range(2 // 0)]\n", 2, "ZeroDivisionError: integer division or modulo by zero"),
        ("    yield []\n    raise KeyError('a\\nb')\n", 3, "KeyError: 'a\\nb'"),
        ("    raise ValueError('one\\ntwo')\n", 2, "ValueError: one"),
        ("    assert not stages\n", 2, "AssertionError"),
        ("    raise SystemExit\n", 2, "SystemExit"),
        (
            "    return own(stages)\n\ndef own(count):\n    return [0][count]\n",
            5,
            "IndexError: list index out of range",
        ),
        ("    import json\n    json.loads('{')\n", 3, "JSONDecodeError: Expecting property name"),
        ("    return []\n1 / 0\n", 3, "ZeroDivisionError: division by zero"),
        ("    return []\nraise SystemExit(0)\n", 3, "SystemExit: 0"),
        (
            "    return []\nmine = lambda: 0\n",
            3,
            f"<lambda>() takes 0 positional arguments but 3 were given; {RETURNS}",
        ),
        ("    return []\nmine = dict\n", None, f"dict expected at most 1 argument, got 3; {RETURNS}"),
        ("    return []\n\0", None, "cannot contain null bytes"),
    ],
)
def test_errors_of_a_custom_schedule_name_file_and_line(
    tmp_path: Path, body: str, line: int | None, message: str
) -> None:
    settings = custom(tmp_path, body)
    with pytest.raises(UserError) as caught:
        schedules.make_schedule(settings)
    at = f"{tmp_path / 'custom.py'}:{line}" if line else f"{tmp_path / 'custom.py'}"
    assert str(caught.value).startswith(f"schedule={settings.schedule}: {at}: "), caught.value
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_missing_files_and_functions_are_refused_with_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no function 'yours'; it has mine"):
        schedules.make_schedule(custom(tmp_path, "    return []\n", "yours"))
    with pytest.raises(UserError, match=r"there is no file .*nowhere\.py; .* or use one of naive, gpipe, 1f1b"):
        schedules.make_schedule(PipelineConfig(schedule="nowhere.py:f"))


def test_a_schedule_is_printed() -> None:
    words = [sys.executable, "-m", "common.techniques.pipeline.schedules", "gpipe", "2", "4"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[:2] == ["rank 0 |0123...aabbccdd|", "rank 1 |.0123aabbccdd..|"]
    assert "idle share 20.0%" in done.stdout
