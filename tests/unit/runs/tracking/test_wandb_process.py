"""The process that sends rows of an attempt to W&B."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch

from common.measure import media
from common.runs.folder import RunFolder
from common.runs.tracking.wandb_process import RowForwarder
from common.runs.tracking.wandb_rows import TrackingNote, list_incomplete_notes, read_note, write_note
from tests.harness.runs.synthetic_runs import SyntheticRun


def test_steps_that_a_newer_attempt_repeated_are_not_sent(tmp_path: Path) -> None:
    """The newer attempt resumed from step 3, and its record, of an older version, has no number of rows."""
    first = SyntheticRun(steps=5, step_seconds=0.2, state="finished").write(tmp_path).list_attempts()[0]
    second = RunFolder(first.path).claim_attempt()
    second.record_parent_attempt(1, 3)
    for step in (2, 4):
        media.write_image(first, step, "digit", torch.zeros(2, 2))
    for attempt in (first, second):
        write_note(attempt, TrackingNote())
    run = mock.Mock()
    RowForwarder(second, run, None).forward_ended_attempts()
    sent_rows = [call.args[0] for call in run.log.call_args_list]
    assert [row["global_step"] for row in sent_rows if "loss" in row] == [1, 2, 3]
    assert [row["global_step"] for row in sent_rows if "digit" in row] == [2]


def test_sending_the_rows_of_an_attempt_does_not_change_newer_attempts(tmp_path: Path) -> None:
    """The attempt may be superseded, or resumed while `make sync` sends its rows."""
    folder = SyntheticRun(steps=40, step_seconds=0.2, attempts=2, state="lost").write(tmp_path)
    first, second = folder.list_attempts()
    for attempt in (first, second):
        write_note(attempt, TrackingNote())

    run = mock.Mock()
    forwarder = RowForwarder(first, run, None)
    forwarder.forward_ended_attempts()
    forwarder.finish()
    forwarder.write_notes()
    sent_rows = [call.args[0] for call in run.log.call_args_list]
    assert [row["global_step"] for row in sent_rows] == [1, 2, 3, 4, 5]
    assert read_note(first) == TrackingNote(5, complete=True)
    assert read_note(second) == TrackingNote()
    incomplete = list_incomplete_notes(RunFolder(first.path))
    assert incomplete == [TrackingNote()], "`make sync` and the newer attempt see what is missing"
