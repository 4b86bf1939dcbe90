"""Select the rows of a run that are sent to W&B, and record which rows W&B has received.

W&B stores rows in order of arrival, so the rows that W&B has received are always the first rows of a run. A note in
each attempt folder counts the lines that W&B has received. The journal of an online run maps the step numbers of W&B to
these lines. If the W&B client was killed, W&B reports how many steps it has, and the journal shows which lines are
missing. This module imports neither torch nor wandb.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.runs.folder import RunFolder, read_json, write_atomic, write_json
from common.system.errors import UserError
from common.system.text import read_text_or_empty

NOTE_FILE = "passed_on.json"  # one file in each attempt folder, and one in each offline folder of W&B
AXES = ("global_step", "samples", "time")
TIMINGS = ("time", "step_time", "samples_per_second")  # differ if a step is repeated
MIN_ROW_SECONDS = 0.1  # minimum training time between two sent rows with the same metric names
MAX_DENSE_ROWS = 10_000  # number of rows after which rows are sent less often

RowKey = tuple[tuple[str, Any], ...]


# ---- rows that are sent to W&B


class RowSelection:
    """Selection of the rows of an attempt that are sent to W&B.

    At most ten rows per second are selected for the same metric names, and fewer in long runs. A row is selected if,
    for at least one of its metrics, no value was sent during the current interval. Evaluations and other rare values
    are therefore always sent. The selection depends only on the rows.
    """

    def __init__(self) -> None:
        self.times: dict[str, float] = {}

    def is_row_selected(self, row: dict[str, Any]) -> bool:
        """Return whether to send the next row of the attempt."""
        names = [name for name in row if name not in AXES]
        now = row.get("time")
        if not isinstance(now, int | float):
            return True
        interval = max(MIN_ROW_SECONDS, now / MAX_DENSE_ROWS)
        ages = [now - self.times.get(name, -math.inf) for name in names]
        is_selected = any(not 0 <= age < interval for age in ages)
        if is_selected:
            self.times.update(dict.fromkeys(names, now))
        return is_selected


def choose_rows(attempt: RunFolder) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number, counted from 1, and the content of each row that is sent to W&B."""
    thinning = RowSelection()
    for number, row in enumerate(attempt.parse_attempt_rows(), 1):
        if row and thinning.is_row_selected(row):
            yield number, row


def make_row_key(row: dict[str, Any]) -> RowKey:
    """Return the names and values of a row, without its times, to identify rows that W&B has received.

    The values of a step usually change if the step is repeated with other settings.
    """
    return tuple(sorted((name, number) for name, number in row.items() if name not in TIMINGS))


# ---- records of the rows that W&B has received


@dataclass
class TrackingNote:
    """Record of what W&B has received from an attempt."""

    rows: int = 0
    """Number of lines of metrics.jsonl that W&B has received."""
    media: int = 0
    """Number of lines of media.jsonl that W&B has received."""
    online: bool = False
    """Whether the rows were sent to the W&B host instead of an offline folder."""
    complete: bool = False
    """Whether W&B has also received the final state of the attempt."""


def read_note(attempt: RunFolder) -> TrackingNote | None:
    """Read the note of an attempt. Return None if the attempt is not tracked."""
    content = read_json(attempt.attempt_folder / NOTE_FILE)
    rows = content.get("rows")
    if not isinstance(rows, int):
        return None
    if "complete" not in content:  # written by a version that wrote an offline folder during training
        return TrackingNote(rows, count_lines(attempt.attempt_folder / "media.jsonl"), complete=True)
    return TrackingNote(rows, int(content["media"]), bool(content["online"]), bool(content["complete"]))


def write_note(attempt: RunFolder, note: TrackingNote) -> None:
    """Write the note of an attempt.

    If the disk is full, the note is not written, and the same rows are later sent to W&B again.
    """
    with contextlib.suppress(UserError):
        write_json(attempt.attempt_folder / NOTE_FILE, asdict(note))


def read_notes(folder: RunFolder) -> dict[int, TrackingNote]:
    """Read the notes of all attempts up to the newest tracked attempt, by attempt number.

    Earlier attempts without a note get an empty note. If `folder` selects an attempt, later attempts are skipped,
    because each later attempt has a separate tracking process.
    """
    notes: dict[int, TrackingNote] = {}
    untracked: list[int] = []
    for attempt in folder.list_attempts():
        if folder.number and attempt.number > folder.number:
            break
        note = read_note(attempt)
        if note is None:
            untracked.append(attempt.number)
            continue
        notes |= {number: TrackingNote(complete=True) for number in untracked}
        notes[attempt.number] = note
        untracked.clear()
    return notes


def count_lines(path: Path) -> int:
    """Return the number of complete lines in a file, or 0 if the file is missing."""
    return read_text_or_empty(str(path)).count("\n")


def list_incomplete_notes(folder: RunFolder) -> list[TrackingNote]:
    """Return the notes of attempts that are incomplete in W&B, up to the attempt that `folder` selects."""
    return [note for note in read_notes(folder).values() if not note.complete]


def restore_notes_of_offline_folders(folder: RunFolder) -> None:
    """Restore notes from offline folders whose tracking process was killed before it wrote the notes."""
    for path in folder.path.glob(f"wandb/offline-run-*/{NOTE_FILE}"):
        for number, content in read_json(path).items():
            attempt = RunFolder(folder.path, int(number))
            note = read_note(attempt)
            if attempt.attempt_folder.exists() and (note is None or not note.complete):
                write_note(attempt, TrackingNote(**content))


def list_known_rows(folder: RunFolder, notes: dict[int, TrackingNote]) -> set[RowKey]:
    """Return the keys of the rows that W&B has received from earlier attempts."""
    keys: set[RowKey] = set()
    for attempt in folder.list_attempts():
        note = notes.get(attempt.number)
        if note is None or attempt.number >= folder.number:
            continue
        for number, row in choose_rows(attempt):
            if number > note.rows:
                break
            keys.add(make_row_key(row))
    return keys


# ---- the journal of an online run


@dataclass(frozen=True)
class JournalMark:
    """Line of the journal that describes which rows the W&B history contains from a step on."""

    step: int
    """First step that this mark describes, in the numbering of W&B."""
    attempt: int
    rows: int
    """Number of lines of the attempt's metrics.jsonl that were sent before this step."""
    media: int
    """Number of lines of the attempt's media.jsonl that were sent before this step."""
    items: int = 0
    """Number of images and histograms that are sent from this step on, before any metric rows."""


class Journal:
    """The marks of an online run, stored in wandb/journal.jsonl."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.path = folder.path / "wandb" / "journal.jsonl"

    def read_marks(self) -> list[JournalMark]:
        """Return the marks up to the first damaged line."""
        marks = []
        with contextlib.suppress(ValueError, TypeError):
            for line in read_text_or_empty(str(self.path)).splitlines():
                marks.append(JournalMark(**json.loads(line)))
        return marks

    def clear(self) -> None:
        """Delete the earlier marks, which are no longer needed. Raises UserError if writing fails."""
        write_atomic(self.path, "")

    def append_mark(self, mark: JournalMark) -> None:
        """Append a mark to the journal. Call this method before sending what the mark describes."""
        with contextlib.suppress(OSError), open(self.path, "a") as file:
            file.write(json.dumps(asdict(mark)) + "\n")

    def correct_notes(self, notes: dict[int, TrackingNote], steps: int) -> None:
        """Correct the notes of online attempts if W&B has not received everything that was sent.

        `steps` is the number of steps that W&B has received.
        """
        marks = [mark for mark in self.read_marks() if mark.attempt in notes]
        received = [mark for mark in marks if mark.step <= steps]
        marked_notes = [notes[mark.attempt] for mark in marks]
        has_incomplete = any(note.online and not note.complete for note in marked_notes)
        if not received or not has_incomplete:
            return
        last = received[-1]
        for mark in reversed(marks):  # the first mark of an attempt contains its counts before this session
            if mark.step > steps and mark.attempt != last.attempt:
                notes[mark.attempt].rows = mark.rows
                notes[mark.attempt].media = mark.media
        media_count = min(steps - last.step, last.items)
        row_count = steps - last.step - media_count
        notes[last.attempt].media = last.media + media_count
        notes[last.attempt].rows = self.find_line_of_row(notes, last, row_count)

    def find_line_of_row(self, notes: dict[int, TrackingNote], mark: JournalMark, count: int) -> int:
        """Return the line number, in metrics.jsonl, of the `count`-th row that was sent after a mark."""
        attempt = RunFolder(self.folder.path, mark.attempt)
        sent_keys = list_known_rows(attempt, notes)
        line = mark.rows
        for number, row in choose_rows(attempt):
            if number <= mark.rows or make_row_key(row) in sent_keys:
                continue
            if count == 0:
                break
            line = number
            count -= 1
        return line
