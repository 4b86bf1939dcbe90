"""Files of a run folder that are damaged: what is sound is read, the rest is named or left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.runs.folder import RunFolder
from slurm.reports import heartbeats

GOOD = {"global_step": 1, "samples": 8, "time": 0.5, "loss": 1.5}
BAD = ['{"global_step": "1", "loss": 1}', '{"global_step": null}', "null", "[1]", '{"loss": 1}', "garb\0ge", "", "{"]
BAD += ['{"global_step": 1, "samples": 8, "time": "x", "loss": 1}', '{"global_step": 1, "loss": [1]}']


@pytest.fixture
def attempt(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "mnist_pipeline", "").claim_attempt()


@pytest.mark.parametrize("line", BAD)
def test_a_damaged_line_of_metrics_is_left_out_and_numbered(attempt: RunFolder, line: str) -> None:
    good = [json.dumps(GOOD | {"global_step": step}) for step in range(1, 5)]
    attempt.metrics_file.write_text("\n".join([*good[:2], line, *good[2:]]) + "\n")
    assert [row["global_step"] for row in attempt.read_attempt_rows()] == [1, 2, 3, 4]
    assert attempt.find_damaged_lines() == [3]


def test_a_last_line_that_was_cut_off_is_no_damage(attempt: RunFolder) -> None:
    attempt.metrics_file.write_text(json.dumps(GOOD) + "\n" + '{"global_step": 2, "lo')
    assert attempt.find_damaged_lines() == [] and len(list(attempt.read_attempt_rows())) == 1


def test_rows_up_to_a_checkpoint_are_counted_by_lines(attempt: RunFolder) -> None:
    """A damaged line is one of the rows that had been written: the one after it must not take its place."""
    rows = [json.dumps(GOOD | {"global_step": step}) for step in (1, 2, 3)]
    attempt.metrics_file.write_text("\n".join([rows[0], "null", rows[1], rows[2]]) + "\n")
    attempt.record_parent_attempt(None, 0)
    following = RunFolder(attempt.path).claim_attempt()
    following.record_parent_attempt(1, 2, rows=3)
    assert [row["global_step"] for row in RunFolder(attempt.path).read_rows()] == [1, 2]


@pytest.mark.parametrize("value", [None, "x", [], {}])
def test_a_damaged_heartbeat_is_one_without_a_step(attempt: RunFolder, value: object) -> None:
    beat = {"step": value, "time": value, "before_backward": value}
    (attempt.attempt_folder / "heartbeat-0.json").write_text(json.dumps(beat))
    (found,) = heartbeats.read_heartbeats(attempt)
    assert (found.step, found.time, found.before_backward) == (0, 0.0, None)
