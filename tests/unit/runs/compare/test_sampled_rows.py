"""Rows of long runs are sampled for curves, and rows of short runs are all read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.runs.compare import metric_curves, sampled_rows
from common.runs.folder import RunFolder

STEPS = 60_000
STEPS_PER_EVALUATION = 5_000


def format_position(step: int, evaluations: int) -> str:
    """Return the position of a row. A step takes 10 ms, and an evaluation 20 s."""
    return f'"global_step": {step}, "samples": {64 * step}, "time": {0.01 * step + 20 * evaluations:.2f}'


def format_training_row(step: int, further: str = "") -> str:
    """Return a line of metrics.jsonl, with further values."""
    position = format_position(step, (step - 1) // STEPS_PER_EVALUATION)
    return f'{{{position}, "loss": {2 - step / STEPS:.15f}, "gradient_norm": 1.000000000000000{further}}}\n'


def format_evaluation_row(step: int) -> str:
    position = format_position(step, step // STEPS_PER_EVALUATION)
    return f'{{{position}, "test_loss": {1 / step:.15f}, "test_accuracy": 0.5}}\n'


def write_attempt(folder: RunFolder, steps: range, parent: tuple[int, int, int] | None = None) -> RunFolder:
    """Write an attempt with these steps. `parent` contains a number, a step, and the number of rows that count."""
    attempt = folder.claim_attempt()
    attempt.record_parent_attempt(*(parent or (None, 0)))
    lines = []
    for step in steps:
        lines.append(format_training_row(step))
        if step % STEPS_PER_EVALUATION == 0:
            lines.append(format_evaluation_row(step))
    attempt.metrics_file.write_text("".join(lines))
    return attempt


def list_sampled(folder: RunFolder) -> list[dict[str, Any]]:
    return list(sampled_rows.read_rows_for_curves(folder))


def list_training_steps(rows: list[dict[str, Any]]) -> list[int]:
    return [row["global_step"] for row in rows if "loss" in row]


def list_evaluated_steps(rows: list[dict[str, Any]]) -> list[int]:
    return [row["global_step"] for row in rows if "test_loss" in row]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "ddp_multinode", "")


def test_all_rows_of_a_short_run_are_read(folder: RunFolder) -> None:
    write_attempt(folder, range(1, 101))
    assert list(sampled_rows.read_rows_for_curves(folder)) == folder.read_metrics()


def test_a_sample_contains_the_first_and_last_rows_and_all_evaluations(folder: RunFolder) -> None:
    write_attempt(folder, range(1, STEPS + 1))
    rows = list_sampled(folder)

    steps = list_training_steps(rows)
    assert steps == sorted(set(steps))
    assert {1, 2, STEPS} <= set(steps)
    assert 1000 <= len(steps) <= 2000
    assert max(np.diff(steps)) <= 2 * STEPS / sampled_rows.EVEN_POSITIONS
    assert list_evaluated_steps(rows) == list(range(STEPS_PER_EVALUATION, STEPS + 1, STEPS_PER_EVALUATION))


def test_curves_of_a_sample_follow_those_of_all_rows(folder: RunFolder) -> None:
    write_attempt(folder, range(1, STEPS + 1))
    sampled = metric_curves.read_curves(sampled_rows.read_rows_for_curves(folder))
    complete = metric_curves.read_curves(folder.read_rows())

    loss = sampled.steps["loss"]
    assert loss.value == pytest.approx(2 - loss.positions[:, 0] / STEPS, abs=0.01)
    assert sampled.steps["step_time"].value == pytest.approx(0.01)
    assert sampled.steps.keys() == complete.steps.keys()
    for name, curve in complete.tests.items():
        assert np.array_equal(sampled.tests[name].value, curve.value)


def test_a_sample_excludes_what_a_later_attempt_repeated(folder: RunFolder) -> None:
    write_attempt(folder, range(1, STEPS + 1))
    kept_rows = 50_000 + 10 - 1  # without the evaluation after the last step, which the next attempt repeats
    write_attempt(folder, range(50_001, STEPS + 1), parent=(1, 50_000, kept_rows))
    rows = list_sampled(folder)

    steps = list_training_steps(rows)
    assert steps == sorted(set(steps))
    assert {50_000, 50_001} <= set(steps)
    assert list_evaluated_steps(rows) == [*range(5_000, 50_000, 5_000), 55_000, 60_000]


def test_damaged_lines_are_left_out_of_a_sample(folder: RunFolder) -> None:
    attempt = write_attempt(folder, range(1, STEPS + 1))
    lines = attempt.metrics_file.read_bytes().splitlines(keepends=True)
    lines[20_000:40_000] = [b'{"global_step": 7, \xff\n'] * 20_000
    attempt.metrics_file.write_bytes(b"".join(lines) + b'{"global_step": 60001, "loss"')

    steps = list_training_steps(list_sampled(folder))
    assert steps[-1] == STEPS
    assert not set(steps) & set(range(20_010, 39_900))
    assert len(steps) > 1000


def test_long_rows_are_sampled(folder: RunFolder) -> None:
    attempt = folder.claim_attempt()
    attempt.record_parent_attempt(None, 0)
    further = f', "further": 0.{"1" * 5000}'
    attempt.metrics_file.write_text("".join(format_training_row(step, further) for step in range(1, 2001)))

    rows = list_sampled(folder)
    assert all(row == json.loads(format_training_row(row["global_step"], further)) for row in rows)
    assert len(list_training_steps(rows)) > 800


def test_a_sample_contains_all_values_that_are_logged_in_few_steps(folder: RunFolder) -> None:
    attempt = folder.claim_attempt()
    attempt.record_parent_attempt(None, 0)
    lines = []
    for step in range(1, STEPS + 1):
        further = ', "scale": 2' if step % 2000 == 0 else ""
        further += ', "offset": 1' if step % 1000 == 0 else ""
        lines.append(format_training_row(step, further))
    attempt.metrics_file.write_text("".join(lines))

    curves = metric_curves.read_curves(sampled_rows.read_rows_for_curves(folder)).steps
    for name, distance in (("scale", 2000), ("offset", 1000)):
        assert list(curves[name].positions[:, 0]) == list(range(distance, STEPS + 1, distance))
    assert list_training_steps(list_sampled(folder)) == sorted(set(list_training_steps(list_sampled(folder))))


def test_an_attempt_of_which_no_row_counts_is_left_out(folder: RunFolder) -> None:
    write_attempt(folder, range(1, STEPS + 1))
    write_attempt(folder, range(1, 11), parent=(1, 0, 0))
    assert list_training_steps(list_sampled(folder)) == list(range(1, 11))


def test_the_number_of_evaluations_in_a_sample_is_limited(folder: RunFolder) -> None:
    attempt = folder.claim_attempt()
    attempt.record_parent_attempt(None, 0)
    attempt.metrics_file.write_text("".join(map(format_evaluation_row, range(1, STEPS + 1))))
    steps = list_evaluated_steps(list_sampled(folder))
    assert sampled_rows.MAX_RARE_ROWS <= len(steps) <= 2 * sampled_rows.MAX_RARE_ROWS
    assert steps[0] == 1
    assert steps[-1] == STEPS
