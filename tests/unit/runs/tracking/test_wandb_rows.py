"""The rows that are sent to W&B, and the rows that W&B lacks after its client was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.runs.folder import RunFolder
from common.runs.tracking.wandb_rows import (
    Journal,
    JournalMark,
    RowSelection,
    TrackingNote,
    choose_rows,
    make_row_key,
    read_note,
)
from tests.harness.runs.synthetic_runs import write_rows

Row = dict[str, float | int | None]


def make_row(step: int, time: float, **values: float | None) -> Row:
    return {"global_step": step, "samples": 64 * step, "time": time} | values


def test_at_most_ten_rows_per_second_and_all_rare_values_are_sent() -> None:
    rows = []
    for step in range(1, 5001):
        time = step / 2000  # 2,000 steps per second
        rows.append(make_row(step, time, loss=1 / step))
        if step % 700 == 1:
            rows[-1]["norm"] = 1.0
        if step % 1000 == 0:
            rows.append(make_row(step, time, test_loss=0.5))

    selection = RowSelection()
    selected = [row for row in rows if selection.is_row_selected(row)]
    assert selected[0] == rows[0]
    evaluations = [row for row in selected if "test_loss" in row]
    assert [row["global_step"] for row in evaluations] == [1000, 2000, 3000, 4000, 5000]
    rows_with_norm = [row for row in selected if "norm" in row]
    assert len(rows_with_norm) == 8
    assert 20 <= len(selected) - len(evaluations) - len(rows_with_norm) <= 25


def test_long_runs_send_fewer_rows_per_second() -> None:
    selection = RowSelection()
    rows = [make_row(step, 0.5 * step, loss=1.0) for step in range(1, 100_000)]  # half a day
    selected_rows = sum(selection.is_row_selected(row) for row in rows)
    assert 20_000 < selected_rows < 40_000


def test_rows_with_an_invalid_time_are_sent() -> None:
    selection = RowSelection()
    assert selection.is_row_selected(make_row(1, 5.0, loss=None))
    assert selection.is_row_selected(make_row(2, 1.0, loss=1.0))
    assert selection.is_row_selected({"global_step": 3, "time": None, "loss": 1.0})
    assert not selection.is_row_selected(make_row(4, 1.05, loss=1.0))


@pytest.fixture
def attempt(tmp_path: Path) -> RunFolder:
    """An attempt with 20 rows, all of which are sent."""
    run_attempt = RunFolder(tmp_path).claim_attempt()
    (tmp_path / "wandb").mkdir()
    write_rows(run_attempt, [make_row(step, float(step), loss=1.0) for step in range(1, 21)])
    return run_attempt


@pytest.mark.parametrize(
    "steps, rows, media",
    [(100, 2, 0), (103, 5, 0), (108, 10, 0), (109, 10, 1), (110, 10, 2), (113, 13, 2), (999, 20, 2)],
)
def test_the_journal_determines_which_rows_wandb_received(
    attempt: RunFolder, steps: int, rows: int, media: int
) -> None:
    """W&B had two rows before. Eight more rows, two images, and the remaining rows were sent."""
    journal = Journal(attempt)
    journal.clear()
    journal.append_mark(JournalMark(100, 1, 2, 0))
    journal.append_mark(JournalMark(108, 1, 10, 0, 2))
    notes = {1: TrackingNote(rows=20, media=2, online=True)}
    journal.correct_notes(notes, steps)
    assert notes[1].rows == rows
    assert notes[1].media == media


@pytest.mark.parametrize("complete, rows", [(False, (12, 0)), (True, (20, 7))])
def test_the_journal_corrects_only_incomplete_attempts(
    attempt: RunFolder, complete: bool, rows: tuple[int, int]
) -> None:
    second = attempt.claim_attempt()
    second.metrics_file.write_text(attempt.metrics_file.read_text())
    journal = Journal(attempt)
    journal.clear()
    journal.append_mark(JournalMark(0, 1, 0, 0))
    journal.append_mark(JournalMark(20, 2, 0, 0))
    notes = {
        1: TrackingNote(20, 0, online=True, complete=complete),
        2: TrackingNote(7, 0, online=True, complete=complete),
    }
    journal.correct_notes(notes, 12)
    assert (notes[1].rows, notes[2].rows) == rows


def test_a_note_of_an_older_version_is_complete(attempt: RunFolder) -> None:
    (attempt.attempt_folder / "passed_on.json").write_text('{"rows": 7}')
    (attempt.attempt_folder / "media.jsonl").write_text("{}\n{}\n")
    assert read_note(attempt) == TrackingNote(7, 2, complete=True)


def test_damaged_lines_count_as_rows(attempt: RunFolder) -> None:
    attempt.metrics_file.write_text('{"damaged\n' + attempt.metrics_file.read_text())
    line_number, *_ = next(choose_rows(attempt))
    assert line_number == 2


def test_a_repeated_step_has_the_same_key_although_it_took_longer() -> None:
    row = {
        "global_step": 3,
        "time": 1.0,
        "loss": 0.5,
        "learning_rate": 0.1,
        "step_time": 0.2,
        "samples_per_second": 80.0,
    }
    repeated = row | {"time": 9.0, "step_time": 0.4, "samples_per_second": 40.0}
    assert make_row_key(repeated) == make_row_key(row)
    assert make_row_key(row | {"learning_rate": 0.2}) != make_row_key(row)
