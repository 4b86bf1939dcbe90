"""The rows of a run that are sent to W&B, and records of those it has. Imports neither torch nor W&B.

W&B stores rows in the order of arrival, so it always has a first part of a run's rows. A note in each attempt counts
the lines that W&B has. The journal of an online run maps W&B's step numbers to these lines: if W&B's client was killed,
W&B reports how many steps it has, and the journal tells which lines are missing.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.core.errors import UserError
from common.core.text import read_or_empty
from common.runs.folder import RunFolder, read_json, write_atomic, write_json

NOTE_FILE = "passed_on.json"  # in an attempt's folder; in an offline folder of W&B for all its attempts
AXES = ("global_step", "samples", "time")
MIN_ROW_SECONDS = 0.1  # of training between two rows with the same names
MAX_DENSE_ROWS = 10_000  # after this number of rows they become less frequent

RowKey = tuple[tuple[str, Any], ...]


# ---- rows that are sent to W&B


class Thinning:
    """Selection of an attempt's rows: at most ten per second, less frequent the longer the run takes.

    A row is selected if W&B has received no value of one of its names during the interval. Evaluations and other rare
    values are therefore always sent. The selection depends on the rows alone.
    """

    def __init__(self) -> None:
        self.times: dict[str, float] = {}

    def choose(self, row: dict[str, Any]) -> bool:
        """Return whether the next row of the attempt is sent."""
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
    """Yield line number, from 1, and content of an attempt's rows that are sent to W&B."""
    thinning = Thinning()
    for number, row in enumerate(attempt.parse_attempt_rows(), 1):
        if row and thinning.choose(row):
            yield number, row


def make_row_key(row: dict[str, Any]) -> RowKey:
    """Return the values of a row except its time.

    They differ if a step is repeated with other settings.
    """
    return tuple(sorted((name, number) for name, number in row.items() if name != "time"))


# ---- records of the rows that W&B has


@dataclass
class TrackingNote:
    """Record of what W&B has of an attempt."""

    rows: int = 0
    """Lines of metrics.jsonl."""
    media: int = 0
    """Lines of media.jsonl."""
    online: bool = False
    """Whether the rows were sent to W&B's host instead of an offline folder."""
    complete: bool = False
    """Whether W&B knows how the attempt ended."""


def read_note(attempt: RunFolder) -> TrackingNote | None:
    """Read the note of an attempt; None if the attempt is not tracked."""
    content = read_json(attempt.attempt_folder / NOTE_FILE)
    rows = content.get("rows")
    if not isinstance(rows, int):
        return None
    if "complete" not in content:  # written by a version that tracked into an offline folder while training
        return TrackingNote(rows, count_lines(attempt.attempt_folder / "media.jsonl"), complete=True)
    return TrackingNote(rows, int(content["media"]), bool(content["online"]), bool(content["complete"]))


def write_note(attempt: RunFolder, note: TrackingNote) -> None:
    """Write the note of an attempt.

    If the disk is full, W&B gets the same rows twice.
    """
    with contextlib.suppress(UserError):
        write_json(attempt.attempt_folder / NOTE_FILE, asdict(note))


def read_notes(folder: RunFolder) -> dict[int, TrackingNote]:
    """Read the notes of all attempts up to the newest tracked one.

    Earlier attempts without a note get an empty note.

    If `folder` names an attempt, later ones are skipped: they have their own tracking process.
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
    """Return the number of complete lines of a file; 0 if it is missing."""
    return read_or_empty(str(path)).count("\n")


def list_incomplete_notes(folder: RunFolder) -> list[TrackingNote]:
    """Return the notes of attempts that are incomplete at W&B, up to the attempt that `folder` names."""
    return [note for note in read_notes(folder).values() if not note.complete]


def adopt_offline_folders(folder: RunFolder) -> None:
    """Write the notes of finished offline folders whose process was killed before it wrote them."""
    for path in folder.path.glob(f"wandb/offline-run-*/{NOTE_FILE}"):
        for number, content in read_json(path).items():
            attempt = RunFolder(folder.path, int(number))
            note = read_note(attempt)
            if attempt.attempt_folder.exists() and (note is None or not note.complete):
                write_note(attempt, TrackingNote(**content))


def list_known_rows(folder: RunFolder, notes: dict[int, TrackingNote]) -> set[RowKey]:
    """Return the keys of the rows of earlier attempts that W&B has."""
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
class Mark:
    """Line of the journal: content of W&B's history from one of its steps on."""

    step: int
    """Step in W&B's numbering."""
    attempt: int
    rows: int
    """Lines of the attempt's metrics sent before this step."""
    media: int
    """Lines of its media.jsonl sent before this step."""
    items: int = 0
    """Number of images and histograms at this step, before the rows."""


class Journal:
    """The marks of an online run, in wandb/journal.jsonl."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.path = folder.path / "wandb" / "journal.jsonl"

    def read(self) -> list[Mark]:
        """Return the marks up to the first damaged line."""
        marks = []
        with contextlib.suppress(ValueError, TypeError):
            for line in read_or_empty(str(self.path)).splitlines():
                marks.append(Mark(**json.loads(line)))
        return marks

    def begin(self) -> None:
        """Clear the journal; its earlier marks are no longer needed. Raises UserError."""
        write_atomic(self.path, "")

    def add(self, mark: Mark) -> None:
        """Append a mark, before the content that it describes is sent."""
        with contextlib.suppress(OSError), open(self.path, "a") as file:
            file.write(json.dumps(asdict(mark)) + "\n")

    def correct_notes(self, notes: dict[int, TrackingNote], steps: int) -> None:
        """Reduce the notes of online attempts to the `steps` that W&B received of those that were sent."""
        marks = [mark for mark in self.read() if mark.attempt in notes]
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
        notes[last.attempt].rows = self.find_row(notes, last, row_count)

    def find_row(self, notes: dict[int, TrackingNote], mark: Mark, count: int) -> int:
        """Return the line of metrics that was sent as the `count`-th row after a mark."""
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
