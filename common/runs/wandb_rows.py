"""The rows of a run that W&B gets, and the notes about those that it has. Imports neither torch nor W&B.

W&B keeps its rows in the order in which they arrive, so what it has of a run is always a first part of them. A note in
each attempt counts its lines that W&B has. The journal of an online run relates W&B's own step numbers to these lines:
where W&B's client was killed, W&B says how many steps it has, and the journal which lines are missing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.core.errors import UserError
from common.core.text import read_or_empty
from common.runs.folder import Folder, read_json, write_atomic, write_json

NOTE = "passed_on.json"  # in an attempt's folder, and in an offline folder of W&B for all attempts in it
AXES = ("global_step", "samples", "time")
MIN_SECONDS = 0.1  # of training between two rows with the same names
MAX_ROWS = 10_000  # after which the rows become rarer

RowKey = tuple[tuple[str, Any], ...]


# ---- which rows W&B gets


class Thinning:
    """Choice of an attempt's rows: at most ten a second, and rarer ones the longer the run takes.

    A row is chosen if W&B has had no value of one of its names for that time. Evaluations therefore always count, and
    so does what a script logs rarely. The choice depends on the rows alone.
    """

    def __init__(self) -> None:
        self.times: dict[str, float] = {}

    def choose(self, row: dict[str, Any]) -> bool:
        """Decide about the next row of the attempt."""
        names = [name for name in row if name not in AXES]
        now = row.get("time")
        if not isinstance(now, int | float):
            return True
        interval = max(MIN_SECONDS, now / MAX_ROWS)
        chosen = any(not 0 <= now - self.times.get(name, -math.inf) < interval for name in names)
        if chosen:
            self.times.update(dict.fromkeys(names, now))
        return chosen


def choose_rows(attempt: Folder) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number, from 1, and content of the rows of an attempt that W&B gets."""
    thinning = Thinning()
    for number, row in enumerate(attempt.parse_own_rows(), 1):
        if row and thinning.choose(row):
            yield number, row


def make_row_key(row: dict[str, Any]) -> RowKey:
    """Return the values of a row but for its time: a step that is done again with other settings has others."""
    return tuple(sorted((name, value) for name, value in row.items() if name != "time"))


# ---- what W&B has


@dataclass
class Note:
    """What W&B has of an attempt."""

    rows: int = 0
    """Lines of metrics.jsonl."""
    media: int = 0
    """Lines of media.jsonl."""
    online: bool = False
    """True if the rows went to W&B's host, and not into an offline folder."""
    complete: bool = False
    """True if W&B knows how the attempt ended."""


def read_note(attempt: Folder) -> Note | None:
    """Read the note of an attempt; None for one that is not tracked."""
    content = read_json(attempt.attempt / NOTE)
    rows = content.get("rows")
    if not isinstance(rows, int):
        return None
    if "complete" not in content:  # of a version whose tracker forwarded rows to an offline folder while training
        return Note(rows, count_lines(attempt.attempt / "media.jsonl"), complete=True)
    return Note(rows, int(content["media"]), bool(content["online"]), bool(content["complete"]))


def write_note(attempt: Folder, note: Note) -> None:
    """Write the note of an attempt; on a full disk W&B gets the same rows twice."""
    with contextlib.suppress(UserError):
        write_json(attempt.attempt / NOTE, asdict(note))


def read_notes(folder: Folder) -> dict[int, Note]:
    """Read the notes of all attempts up to the newest that is tracked; earlier ones without a note get an empty one.

    Where `folder` names an attempt, later ones are left out: they track themselves.
    """
    attempts = [attempt for attempt in folder.attempts() if not folder.number or attempt.number <= folder.number]
    notes = {attempt.number: read_note(attempt) for attempt in attempts}
    newest = max((number for number, note in notes.items() if note is not None), default=0)
    return {number: note or Note(complete=True) for number, note in notes.items() if number <= newest}


def count_lines(path: Path) -> int:
    """Count the complete lines of a file; 0 for one that is missing."""
    return read_or_empty(str(path)).count("\n")


def find_incomplete(folder: Folder) -> list[Note]:
    """Return the notes of the attempts, up to the one that `folder` names, of which W&B does not have everything."""
    return [note for note in read_notes(folder).values() if not note.complete]


def adopt_offline_folders(folder: Folder) -> None:
    """Write the notes that a process was killed before: it had put an offline folder of W&B in its place."""
    for path in folder.path.glob(f"wandb/offline-run-*/{NOTE}"):
        for number, content in read_json(path).items():
            attempt = Folder(folder.path, int(number))
            note = read_note(attempt)
            if attempt.attempt.exists() and (note is None or not note.complete):
                write_note(attempt, Note(**content))


def list_known_rows(folder: Folder, notes: dict[int, Note]) -> set[RowKey]:
    """Return the keys of the rows of earlier attempts that W&B has."""
    known: set[RowKey] = set()
    for attempt in folder.attempts():
        note = notes.get(attempt.number)
        if note is None or attempt.number >= folder.number:
            continue
        chosen = itertools.takewhile(lambda item, last=note.rows: item[0] <= last, choose_rows(attempt))  # type: ignore[misc]
        known.update(make_row_key(row) for _, row in chosen)
    return known


# ---- the journal of an online run


@dataclass(frozen=True)
class Mark:
    """Line of the journal: what W&B's history holds from one of its steps on."""

    step: int
    """Step of W&B's own count."""
    attempt: int
    rows: int
    """Lines of the attempt's metrics that W&B has got before."""
    media: int
    """Lines of its media.jsonl that W&B has got before."""
    items: int = 0
    """Number of images and histograms that come first; rows follow."""


class Journal:
    """The marks of an online run, in wandb/journal.jsonl."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.path = folder.path / "wandb" / "journal.jsonl"

    def read(self) -> list[Mark]:
        """Return the marks; a damaged line and those after it are left out."""
        marks = []
        with contextlib.suppress(ValueError, TypeError):
            for line in read_or_empty(str(self.path)).splitlines():
                marks.append(Mark(**json.loads(line)))
        return marks

    def begin(self) -> None:
        """Start it anew; what was before is settled. Raises UserError."""
        write_atomic(self.path, "")

    def add(self, mark: Mark) -> None:
        """Append a mark, before W&B gets what it describes."""
        with contextlib.suppress(OSError), open(self.path, "a") as file:
            file.write(json.dumps(asdict(mark)) + "\n")

    def correct_notes(self, notes: dict[int, Note], steps: int) -> None:
        """Correct the notes of online attempts to the `steps` that W&B has: more was passed on than it received."""
        marks = [mark for mark in self.read() if mark.attempt in notes]
        reached = [mark for mark in marks if mark.step <= steps]
        if not reached or not any(notes[mark.attempt].online and not notes[mark.attempt].complete for mark in marks):
            return
        last = reached[-1]
        for mark in reversed(marks):  # the first mark of an attempt tells what it had before
            if mark.step > steps and mark.attempt != last.attempt:
                notes[mark.attempt].rows = mark.rows
                notes[mark.attempt].media = mark.media
        items = min(steps - last.step, last.items)
        notes[last.attempt].media = last.media + items
        notes[last.attempt].rows = self.find_row(notes, last, steps - last.step - items)

    def find_row(self, notes: dict[int, Note], mark: Mark, count: int) -> int:
        """Return the line of metrics that W&B got as the number `count` after a mark."""
        attempt = Folder(self.folder.path, mark.attempt)
        known = list_known_rows(attempt, notes)
        position = mark.rows
        for number, row in choose_rows(attempt):
            if number <= mark.rows or make_row_key(row) in known:
                continue
            if count == 0:
                break
            position = number
            count -= 1
        return position
