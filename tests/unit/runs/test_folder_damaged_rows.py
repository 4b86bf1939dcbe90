"""Damaged lines of metrics are omitted, and their numbers are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.runs.folder import RunFolder

DAMAGED_LINES = [
    '{"global_step": "1", "loss": 1}',
    '{"global_step": null}',
    "null",
    "[1]",
    '{"loss": 1}',
    "garb\0ge",
    "",
    "{",
    '{"global_step": 1, "samples": 8, "time": "x", "loss": 1}',
    '{"global_step": 1, "loss": [1]}',
]


def make_line(step: int) -> str:
    row = {"global_step": step, "samples": 8, "time": 0.5, "loss": 1.5}
    return json.dumps(row) + "\n"


@pytest.fixture
def attempt(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "mnist_pipeline", "").claim_attempt()


@pytest.mark.parametrize("damaged_line", DAMAGED_LINES)
def test_a_damaged_line_is_omitted_and_its_number_is_known(attempt: RunFolder, damaged_line: str) -> None:
    lines = [make_line(1), make_line(2), damaged_line + "\n", make_line(3), make_line(4)]
    attempt.metrics_file.write_text("".join(lines))
    assert [row["global_step"] for row in attempt.read_attempt_rows()] == [1, 2, 3, 4]
    assert attempt.find_damaged_lines() == [3]


def test_an_incomplete_last_line_is_not_damaged(attempt: RunFolder) -> None:
    attempt.metrics_file.write_text(make_line(1) + '{"global_step": 2, "lo')
    assert attempt.find_damaged_lines() == []
    assert len(list(attempt.read_attempt_rows())) == 1


def test_a_damaged_line_counts_as_a_row_of_the_checkpoint(attempt: RunFolder) -> None:
    """The line after it, which was written after the checkpoint, must not take its place."""
    lines = [make_line(1), "null\n", make_line(2), make_line(3)]
    attempt.metrics_file.write_text("".join(lines))
    attempt.record_parent_attempt(None, 0)
    second = RunFolder(attempt.path).claim_attempt()
    second.record_parent_attempt(1, 2, rows=3)
    rows = RunFolder(attempt.path).read_rows()
    assert [row["global_step"] for row in rows] == [1, 2]
