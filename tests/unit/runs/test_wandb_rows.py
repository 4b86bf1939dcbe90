"""Which rows W&B gets, and what it misses after its client was killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from common.config.config import ROOT
from common.runs.folder import RunFolder
from common.runs.tracking import wandb_account
from common.runs.tracking.wandb_process import RowForwarder
from common.runs.tracking.wandb_rows import (
    Journal,
    JournalMark,
    RowSelection,
    TrackingNote,
    choose_rows,
    list_incomplete_notes,
    read_note,
    write_note,
)
from tests.harness.made_runs import Made


def make_row(step: int, time: float, **values: float | None) -> dict[str, float | int | None]:
    return {"global_step": step, "samples": 64 * step, "time": time} | values


def test_wandb_gets_at_most_ten_rows_a_second_and_all_that_are_rare() -> None:
    thinning = RowSelection()
    rows = []
    for step in range(1, 5001):  # 2,000 steps a second
        rows.append(make_row(step, step / 2000, loss=1 / step))
        if step % 1000 == 0:
            rows.append(make_row(step, step / 2000, test_loss=0.5))
        if step % 700 == 1:
            rows[-1]["norm"] = 1.0
    chosen = [row for row in rows if thinning.is_row_selected(row)]
    plain = [row for row in chosen if "test_loss" not in row and "norm" not in row]
    assert chosen[0] == rows[0] and 20 <= len(plain) <= 25
    assert [row["global_step"] for row in chosen if "test_loss" in row] == [1000, 2000, 3000, 4000, 5000]
    assert len([row for row in chosen if "norm" in row]) == 8


def test_a_long_run_has_fewer_rows_a_second() -> None:
    thinning = RowSelection()
    chosen = [step for step in range(1, 100_000) if thinning.is_row_selected(make_row(step, 0.5 * step, loss=1.0))]
    assert 20_000 < len(chosen) < 40_000, "half a day of steps of half a second"


def test_rows_of_strange_times_are_chosen() -> None:
    thinning = RowSelection()
    rows = [make_row(1, 5.0, loss=None), make_row(2, 1.0, loss=1.0), {"global_step": 3, "time": None, "loss": 1.0}]
    assert all(thinning.is_row_selected(row) for row in rows)
    assert not thinning.is_row_selected(make_row(4, 1.05, loss=1.0))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with an attempt of 20 rows, each chosen."""
    attempt = RunFolder(tmp_path).claim_attempt()
    (tmp_path / "wandb").mkdir()
    lines = [json.dumps(make_row(step, float(step), loss=1.0)) + "\n" for step in range(1, 21)]
    attempt.metrics_file.write_text("".join(lines))
    return attempt


@pytest.mark.parametrize(
    ("steps", "rows", "media"),
    [(100, 2, 0), (103, 5, 0), (108, 10, 0), (109, 10, 1), (110, 10, 2), (113, 13, 2), (999, 20, 2)],
)
def test_the_journal_tells_which_rows_wandb_received(folder: RunFolder, steps: int, rows: int, media: int) -> None:
    """Two rows were known before; eight more, two images, and further rows were passed on."""
    journal = Journal(folder)
    journal.clear()
    journal.append_mark(JournalMark(100, 1, 2, 0))
    journal.append_mark(JournalMark(108, 1, 10, 0, 2))
    notes = {1: TrackingNote(rows=20, media=2, online=True)}
    journal.correct_notes(notes, steps)
    assert (notes[1].rows, notes[1].media) == (rows, media)


def test_the_journal_tells_of_several_attempts(folder: RunFolder) -> None:
    second = folder.claim_attempt()
    second.metrics_file.write_text(folder.metrics_file.read_text())  # the same again
    journal = Journal(folder)
    journal.clear()
    journal.append_mark(JournalMark(0, 1, 0, 0))
    journal.append_mark(JournalMark(20, 2, 0, 0))
    notes = {1: TrackingNote(20, 0, online=True), 2: TrackingNote(7, 0, online=True)}
    journal.correct_notes(notes, 12)
    assert (notes[1].rows, notes[2].rows) == (12, 0)
    notes = {1: TrackingNote(20, 0, online=True, complete=True), 2: TrackingNote(7, 0, online=True, complete=True)}
    journal.correct_notes(notes, 12)
    assert (notes[1].rows, notes[2].rows) == (20, 7), "complete attempts are not looked at"


def test_the_conversion_of_an_attempt_leaves_newer_ones_alone(tmp_path: Path) -> None:
    """Of one that is superseded, or resumed while `make sync` works on it: the newer one has only begun."""
    first, second = Made(steps=40, step_seconds=0.2, attempts=2, state="lost").write(tmp_path).list_attempts()
    for attempt in (first, second):
        write_note(attempt, TrackingNote())
    run = mock.Mock()
    forwarder = RowForwarder(first, run, None)
    forwarder.forward_ended_attempts()
    forwarder.finish()
    forwarder.write_notes()
    assert [call.args[0]["global_step"] for call in run.log.call_args_list] == [1, 2, 3, 4, 5]
    assert read_note(first) == TrackingNote(5, complete=True) and read_note(second) == TrackingNote()
    assert list_incomplete_notes(RunFolder(first.path)) == [TrackingNote()], (
        "make sync and the newer attempt see what is missing"
    )


def test_a_note_of_an_older_version_counts_as_complete(folder: RunFolder) -> None:
    (folder.attempt_folder / "passed_on.json").write_text('{"rows": 7}')
    (folder.attempt_folder / "media.jsonl").write_text("{}\n{}\n")
    assert read_note(folder) == TrackingNote(7, 2, complete=True)


def test_damaged_lines_are_counted(folder: RunFolder) -> None:
    folder.metrics_file.write_text('{"damaged\n' + folder.metrics_file.read_text())
    assert next(choose_rows(folder))[0] == 2


@pytest.mark.parametrize(
    ("name", "content", "variables", "is_found"),
    [
        (".netrc", "machine github.com\n login me\n password x\n", {}, False),
        (".netrc", "machine api.wandb.ai\n login user\n password x\n", {}, True),
        (".netrc", "machine w.example.org\n login user\n password x\n", {}, False),
        (
            ".netrc",
            "machine w.example.org\n login user\n password x\n",
            {"WANDB_BASE_URL": "https://w.example.org"},
            True,
        ),
        ("other", "machine api.wandb.ai\n login user\n password x\n", {"NETRC": "~/other"}, True),
        (".config/wandb/settings", "[default]\napi_key = x\n", {}, True),
        ("x", "", {"WANDB_API_KEY": "x"}, True),
        ("x", "", {"WANDB_IDENTITY_TOKEN_FILE": "/x"}, True),
    ],
)
def test_an_account_is_looked_for_where_wandb_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: str,
    variables: dict[str, str],
    is_found: bool,
) -> None:
    for known in os.environ:
        if known.startswith("WANDB_") or known == "NETRC":
            monkeypatch.delenv(known)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(content)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert (wandb_account.find_missing_account() == "") == is_found


def test_the_account_is_looked_for_without_wandb() -> None:
    program = "import sys\nfrom common.runs.tracking import wandb_account\nwandb_account.find_missing_account()\n"
    program += "print('wandb' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
