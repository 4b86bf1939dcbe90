"""The tracking process: it gives W&B the rows of a run folder that it misses, and ends.

    python -m common.runs.wandb_process RUN_FOLDER ATTEMPT online SECONDS     follows a run until stdin closes
    python -m common.runs.wandb_process RUN_FOLDER ATTEMPT offline SECONDS    converts a run that has ended

It ends itself SECONDS after stdin has closed, or after the start of a conversion, also where its owner is gone.
`online` ends at once with status NO_HOST where W&B cannot be reached; the run is then converted after its end, as with
`offline`. A conversion counts when its folder is moved to its place, so one that was cut off leaves no rows behind.
Account and host are checked before wandb.init, since a failing online init takes a minute and a half. Imports no torch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from common.core.errors import summarize_error
from common.core.processes import adopt_orphans, kill_children
from common.runs import wandb_scratch
from common.runs.folder import Folder, Part, read_json, write_json
from common.runs.metrics_rows import is_row
from common.runs.result import parse_result
from common.runs.wandb_account import choose_mode
from common.runs.wandb_rows import (
    NOTE,
    Journal,
    Mark,
    Note,
    Thinning,
    adopt_offline_folders,
    choose_rows,
    find_incomplete,
    list_known_rows,
    make_row_key,
    read_note,
    read_notes,
    write_note,
)
from common.runs.wandb_run import MediaReader, init_wandb_run, log_model_artifact

POLL_SECONDS = 0.3  # between two reads of the metrics file
TAIL_BYTES = 65_536  # of the metrics file, among which a row ends
TIMED_OUT = 3  # exit status of a tracking process whose time is over
NO_HOST = 4  # exit status where the run is to be converted after its end
RESTARTS = 5  # of W&B's client, which a scheduler may kill with the ranks
SERVICE = "WANDB_SERVICE"  # names the helper process of an earlier wandb


class Forwarder:
    """Passes on what W&B misses of a run, oldest attempt first."""

    def __init__(self, folder: Folder, run: Any, journal: Journal | None) -> None:
        """With a `journal` the run is online, and `run` has resumed what W&B's host has of it. Raises UserError."""
        self.folder, self.run, self.journal = folder, run, journal
        self.notes = read_notes(folder)
        self.step = 0
        if journal is not None:
            self.step = run.starting_step
            journal.correct_notes(self.notes, self.step)
            self.write_notes()
            journal.begin()
        self.known = list_known_rows(folder, self.notes)
        self.media: dict[int, MediaReader] = {}

    def forward_ended_attempts(self) -> None:
        """Pass on what counts of the attempts that have ended."""
        for part in self.folder.list_parts():
            note = self.notes.get(part.attempt.number)
            is_here = part.attempt.number == self.folder.number
            if note is None or (is_here if self.journal else note.online):
                continue
            self.begin_attempt(part.attempt)
            began = find_start_time(part.attempt)
            for number, row in choose_rows(part.attempt):
                if part.rows is not None and number > part.rows:
                    break
                if part.counts(row["global_step"]):
                    self.forward_row(part.attempt, number, row, began)
            self.forward_media(part)

    def begin_attempt(self, attempt: Folder) -> None:
        """Note from which step on W&B's history has rows of an attempt."""
        if self.journal is not None:
            note = self.notes[attempt.number]
            note.online = True
            write_note(attempt, note)
            self.journal.add(Mark(self.step, attempt.number, note.rows, note.media))

    def forward_row(self, attempt: Folder, number: int, row: dict[str, Any], began: float | None) -> None:
        """Pass on a row, unless W&B has it, also from an attempt before: a step that was done again, to the bit.

        `began` is the time since 1970 at which the row's own clock was 0; without it the row gets the present time.
        """
        note = self.notes[attempt.number]
        if number <= note.rows:
            return
        key = make_row_key(row)
        if key not in self.known:
            written = {} if began is None else {"_timestamp": began + (row.get("time") or 0.0)}
            self.run.log(row | written)
            self.step += 1
            if attempt.number != self.folder.number:
                self.known.add(key)
        note.rows = number

    def forward_media(self, part: Part) -> None:
        """Pass on images and histograms that are new."""
        note = self.notes[part.attempt.number]
        reader = self.media.setdefault(part.attempt.number, MediaReader(part.attempt, note.media))
        items = [item for item in reader.read() if part.counts(item["global_step"])]
        if items and self.journal is not None:
            self.journal.add(Mark(self.step, part.attempt.number, note.rows, note.media, len(items)))
        for item in items:
            self.run.log(item)
        self.step += len(items)
        note.media = reader.lines

    def forward_growing_attempt(self, lines: Iterator[str | None]) -> None:
        """Pass on the rows of the attempt that trains, as they come."""
        attempt = self.folder
        self.begin_attempt(attempt)
        began = find_start_time(attempt)
        thinning = Thinning()
        number = 0
        for line in lines:
            if line is None:
                self.forward_media(Part(attempt, None, None))
                write_note(attempt, self.notes[attempt.number])
                continue
            number += 1
            row = parse_row(line)
            if row and thinning.choose(row):
                self.forward_row(attempt, number, row, began)
        self.notes[attempt.number].rows = max(self.notes[attempt.number].rows, number)
        self.forward_media(Part(attempt, None, None))

    def finish(self) -> None:
        """Pass on model and result, and let W&B finish the run."""
        result = self.folder.result
        log_model_artifact(self.run, self.folder)
        restarts = len(self.folder.attempts()) - 1
        self.run.summary.update(parse_result(result).list_columns() | {"restarts": restarts})
        self.run.finish(exit_code=int(result.get("exit_status", 1)))
        for note in self.notes.values():
            note.complete = note.complete or not note.online or self.journal is not None

    def write_notes(self) -> None:
        """Write the notes of all attempts."""
        for number, note in self.notes.items():
            write_note(Folder(self.folder.path, number), note)


def find_start_time(attempt: Folder) -> float | None:
    """Return the time since 1970 at which the rows' clock was 0: the last row is as old as the file's last change."""
    try:
        with open(attempt.metrics_file, "rb") as file:
            changed = os.fstat(file.fileno()).st_mtime
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    times = [row["time"] for row in map(parse_row, lines) if row and isinstance(row.get("time"), int | float)]
    return changed - times[-1] if times else None


def parse_row(line: str) -> dict[str, Any] | None:
    """Parse a line of metrics; None for one that a full disk has cut off."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if is_row(row) else None


def follow_lines(path: Path, closed: threading.Event) -> Iterator[str | None]:
    """Yield the lines of a growing file, and None whenever it has no more for now, until `closed`."""
    position, rest = 0, ""
    while True:
        is_last = closed.wait(POLL_SECONDS)
        if path.exists():
            with open(path, errors="replace") as file:
                file.seek(position)
                rest += file.read()
                position = file.tell()
        *lines, rest = rest.split("\n")
        yield from lines
        if is_last:
            return
        yield None


def track_online(folder: Folder, closed: threading.Event) -> int:
    """Pass on the rows of a run while it trains; return the exit status."""
    while not folder.metrics_file.exists() and not closed.wait(POLL_SECONDS):
        pass  # the import does not compete with the first step
    note = read_note(folder)
    had_host = note is not None and note.online
    mode, reason = choose_mode("online")
    if mode == "offline":
        if had_host:
            raise ConnectionError(reason)
        note_offline(folder, reason)
        return NO_HOST
    if not folder.attempt.exists():  # moved or deleted: W&B would create it again
        return 1
    try:
        run = init_wandb_run(folder, "online", folder.path)
    except Exception as error:
        if had_host:
            raise
        note_offline(folder, f"W&B refused the run: {summarize_error(error)}")
        return NO_HOST
    wandb_scratch.note_client_processes(folder)
    status = {"id": run.id, "mode": "online", "reason": "", "url": run.url, "dir": str(Path(run.dir).parent)}
    write_json(folder.path / "wandb" / "status.json", status)
    forwarder = Forwarder(folder, run, Journal(folder))
    forwarder.forward_ended_attempts()
    forwarder.forward_growing_attempt(follow_lines(folder.metrics_file, closed))
    forwarder.finish()
    forwarder.write_notes()
    return 0


def note_offline(folder: Folder, reason: str) -> None:
    """Record why a run is offline. Raises UserError."""
    status = read_json(folder.path / "wandb" / "status.json")
    write_json(folder.path / "wandb" / "status.json", status | {"mode": "offline", "reason": reason})


def convert(folder: Folder) -> int:
    """Make an offline run of W&B from what it misses of a run that has ended; return the exit status."""
    staging = wandb_scratch.name_staging_folder(folder)
    staging.mkdir()
    run = init_wandb_run(folder, "offline", staging)
    wandb_scratch.note_client_processes(folder)
    forwarder = Forwarder(folder, run, None)
    forwarder.forward_ended_attempts()
    forwarder.finish()
    made = Path(run.dir).parent
    contents = {number: asdict(note) for number, note in forwarder.notes.items() if not note.online}
    write_json(made / NOTE, contents)
    place = folder.path / "wandb" / made.name
    made.rename(place)  # from now on it counts
    forwarder.write_notes()
    status = read_json(folder.path / "wandb" / "status.json")
    status |= {"id": run.id, "mode": "offline", "dir": str(place)}
    write_json(folder.path / "wandb" / "status.json", status)
    return 0


class Deadline:
    """End of this process: some seconds after its owner has ended or closed stdin."""

    def __init__(self, folder: Folder, at: float) -> None:
        """`at` is the time on the monotonic clock, 0 while it is open."""
        self.folder, self.at = folder, at
        self.has_lock = False
        self.closed = threading.Event()

    def watch(self, seconds: float, *, follow: bool) -> None:
        """Set `closed` when stdin closes, however the owner ended, and end this process `seconds` later."""
        if follow:
            sys.stdin.read()
            if not self.folder.result:  # the owner was killed: its ranks end a moment after it, and may still write
                time.sleep(POLL_SECONDS)
        self.at = self.at or time.monotonic() + seconds
        self.closed.set()
        time.sleep(max(0.0, self.at - time.monotonic()))
        self.leave(TIMED_OUT)

    def leave(self, status: int) -> NoReturn:
        """End this process and the processes of W&B's client, and remove its temporary folders."""
        kill_children()
        if self.has_lock:
            wandb_scratch.remove_scratch(self.folder)
        sys.stderr.flush()
        os._exit(status)


def main(path: str, number: str, mode: str, seconds: str, restarts: str = "0", at: str = "0") -> None:
    """Pass on what W&B misses; start again where W&B's client was killed."""
    for signal_number in (signal.SIGTERM, signal.SIGUSR2):  # SLURM signals every process of a job
        signal.signal(signal_number, signal.SIG_IGN)
    os.nice(10)  # training goes first
    adopt_orphans()  # W&B's helpers leave processes behind
    folder = Folder(Path(path), int(number))
    (folder.path / "wandb").mkdir(exist_ok=True)
    deadline = Deadline(folder, float(at))
    follow = {"follow": mode == "online"}
    watch = threading.Thread(target=deadline.watch, args=(float(seconds),), kwargs=follow, daemon=True)
    watch.start()
    with wandb_scratch.locked_tracking(folder):
        deadline.has_lock = True
        wandb_scratch.remove_scratch(folder)
        temporary = wandb_scratch.open_temporary_folder(folder)
        try:
            status = pass_on(folder, mode, deadline)
        except Exception as error:  # noqa: BLE001 (W&B may raise anything; the traceback goes to the log)
            if int(restarts) < RESTARTS and is_connection_lost(error):
                print(f"W&B's client has ended ({summarize_error(error)}): it is started again", file=sys.stderr)
                arguments = [path, number, mode, seconds, str(int(restarts) + 1), str(deadline.at)]
                start_again(arguments, folder, temporary)
            traceback.print_exc()
            status = 1
        deadline.leave(status)


def pass_on(folder: Folder, mode: str, deadline: Deadline) -> int:
    """Pass on what W&B misses, and let its client end; return the exit status."""
    adopt_offline_folders(folder)
    if read_note(folder) is None:
        write_note(folder, Note())
    if mode == "online":
        status = track_online(folder, deadline.closed)
    elif find_incomplete(folder):
        status = convert(folder)
    else:  # another process has just done it
        return 0
    shut_down_wandb()
    return status


def start_again(arguments: list[str], folder: Folder, temporary: Path) -> NoReturn:
    """Replace this process by a fresh one, a moment later."""
    sys.stderr.flush()
    kill_children()
    wandb_scratch.remove_scratch(folder)
    time.sleep(POLL_SECONDS * 2 ** int(arguments[4]))
    os.environ.pop(SERVICE, None)
    os.environ["TMPDIR"] = str(temporary.parent)
    os.execv(sys.executable, [sys.executable, "-m", "common.runs.wandb_process", *arguments])


def is_connection_lost(error: Exception) -> bool:
    """Check for an error that a killed client of W&B leads to."""
    return isinstance(error, ConnectionError) or type(error).__name__ in (
        "CommError",
        "HandleAbandonedError",
        "MailboxClosedError",
        "WandbServiceConnectionError",
    )


def shut_down_wandb() -> None:
    """Let W&B's helper end."""
    import wandb

    wandb.teardown()


if __name__ == "__main__":
    main(*sys.argv[1:])
