"""The tracking process, which sends the missing rows of a run folder to W&B and then exits.

    python -m common.runs.tracking.wandb_process RUN_FOLDER ATTEMPT online SECONDS     follow a run until stdin closes
    python -m common.runs.tracking.wandb_process RUN_FOLDER ATTEMPT offline SECONDS    convert a run that has ended

The process exits at most SECONDS after stdin has closed or after a conversion has started, even if the process that
started it was killed. In online mode, the tracking process exits with status NO_HOST if W&B cannot be reached. In this
case, the run is converted after training has ended, as in offline mode. A conversion takes effect when its folder is
moved to the final path, so an interrupted conversion leaves no rows behind. The account and the host are checked before
wandb.init, because a failing online init takes 90 seconds. This module does not import torch.
"""

from __future__ import annotations

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

from common.runs.folder import AttemptPart, RunFolder, read_json, write_json
from common.runs.metrics_rows import is_row, parse_json
from common.runs.result import parse_result
from common.runs.tracking import wandb_scratch
from common.runs.tracking.wandb_account import choose_mode
from common.runs.tracking.wandb_rows import (
    NOTE_FILE,
    Journal,
    JournalMark,
    RowSelection,
    TrackingNote,
    choose_rows,
    list_incomplete_notes,
    list_known_rows,
    make_row_key,
    read_note,
    read_notes,
    restore_notes_of_offline_folders,
    write_note,
)
from common.runs.tracking.wandb_run import MediaReader, init_wandb_run, log_model_artifact
from common.system.errors import summarize_error
from common.system.processes import adopt_orphans, kill_children

POLL_SECONDS = 0.3  # time between two reads of the metrics file
TAIL_BYTES = 65_536  # size of the last part of the metrics file, which contains at least one complete row
TIMED_OUT = 3  # exit status if the time limit was exceeded
NO_HOST = 4  # exit status if the run must be converted after training has ended
MAX_RESTARTS = 5  # maximum number of restarts; a scheduler may kill the W&B client together with the ranks
SERVICE = "WANDB_SERVICE"  # environment variable that identifies a W&B helper process started earlier
LOST_CLIENT_ERRORS = ("CommError", "HandleAbandonedError", "MailboxClosedError", "WandbServiceConnectionError")
"""Names of the exceptions that wandb raises after its client was killed, in addition to ConnectionError."""


class RowForwarder:
    """Sender of all rows that W&B has not received from a run, starting with the oldest attempt."""

    def __init__(self, folder: RunFolder, run: Any, journal: Journal | None) -> None:
        """Prepare to send rows to the W&B run `run`. Raises UserError if the run folder cannot be written.

        If `journal` is not None, the run is online, and `run` continues the run that exists on the W&B host.
        """
        self.folder = folder
        self.run = run
        self.journal = journal
        self.notes = read_notes(folder)
        self.step = 0
        if journal is not None:
            self.step = run.starting_step
            journal.correct_notes(self.notes, self.step)
            self.write_notes()
            journal.clear()
        self.sent_keys = list_known_rows(folder, self.notes)
        self.media: dict[int, MediaReader] = {}

    def forward_ended_attempts(self) -> None:
        """Send the rows of all ended attempts, except the rows of steps that a later attempt repeated."""
        for part in self.folder.list_attempt_parts():
            attempt = part.attempt
            note = self.notes.get(attempt.number)
            if note is None:
                continue
            is_handled_elsewhere = attempt.number == self.folder.number if self.journal else note.online
            if is_handled_elsewhere:
                continue
            self.begin_attempt(attempt)
            start_time = find_start_time(attempt)
            for number, row in choose_rows(attempt):
                if part.rows is not None and number > part.rows:
                    break
                if part.includes_step(row["global_step"]):
                    self.forward_row(attempt, number, row, start_time)
            self.forward_media(part)

    def begin_attempt(self, attempt: RunFolder) -> None:
        """Record the W&B step at which the rows of an attempt begin."""
        if self.journal is not None:
            note = self.notes[attempt.number]
            note.online = True
            write_note(attempt, note)
            mark = JournalMark(self.step, attempt.number, note.rows, note.media)
            self.journal.append_mark(mark)

    def forward_row(self, attempt: RunFolder, number: int, row: dict[str, Any], start_time: float | None) -> None:
        """Send a row if W&B has not received it.

        If a later attempt repeats a step with an identical row, the repeated row is not sent. `start_time` is the start
        of the row's clock in seconds since 1970. Without `start_time`, the row gets the current time.
        """
        note = self.notes[attempt.number]
        if number <= note.rows:
            return
        key = make_row_key(row)
        if key not in self.sent_keys:
            timestamp = {} if start_time is None else {"_timestamp": start_time + (row.get("time") or 0.0)}
            self.run.log(row | timestamp)
            self.step += 1
            if attempt.number != self.folder.number:
                self.sent_keys.add(key)
        note.rows = number

    def forward_media(self, part: AttemptPart) -> None:
        """Send the new images and histograms of an attempt."""
        number = part.attempt.number
        note = self.notes[number]
        reader = self.media.setdefault(number, MediaReader(part.attempt, note.media))
        rows = [row for row in reader.read() if part.includes_step(row["global_step"])]
        if rows and self.journal is not None:
            mark = JournalMark(self.step, number, note.rows, note.media, len(rows))
            self.journal.append_mark(mark)
        for row in rows:
            self.run.log(row)
        self.step += len(rows)
        note.media = reader.lines

    def forward_growing_attempt(self, lines: Iterator[str | None]) -> None:
        """Send the rows of the current attempt while rank 0 writes them."""
        attempt = self.folder
        self.begin_attempt(attempt)
        note = self.notes[attempt.number]
        start_time = find_start_time(attempt)
        thinning = RowSelection()
        number = 0
        for line in lines:
            if line is None:
                self.forward_media(AttemptPart(attempt, None, None))
                write_note(attempt, note)
                continue
            number += 1
            row = parse_row(line)
            if row and thinning.is_row_selected(row):
                self.forward_row(attempt, number, row, start_time)
        note.rows = max(note.rows, number)
        self.forward_media(AttemptPart(attempt, None, None))

    def finish(self) -> None:
        """Send the model and the result, and finish the W&B run."""
        from common.runs.result_columns import list_summary_columns  # training does not need this module

        result = self.folder.result
        log_model_artifact(self.run, self.folder)
        restarts = len(self.folder.list_attempts()) - 1
        self.run.summary.update(list_summary_columns(parse_result(result), restarts))
        self.run.finish(exit_code=int(result.get("exit_status", 1)))
        for note in self.notes.values():
            note.complete = note.complete or not note.online or self.journal is not None

    def write_notes(self) -> None:
        """Write the tracking notes of all attempts."""
        for number, note in self.notes.items():
            write_note(RunFolder(self.folder.path, number), note)


def find_start_time(attempt: RunFolder) -> float | None:
    """Return the time, in seconds since 1970, at which `time` was 0 in the rows of an attempt.

    The last row is assumed to have been written when metrics.jsonl was last modified. Returns None if metrics.jsonl
    contains no complete row.
    """
    try:
        with open(attempt.metrics_file, "rb") as file:
            file_status = os.fstat(file.fileno())
            file.seek(max(0, file_status.st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    for row in map(parse_row, reversed(lines)):
        if row and isinstance(row.get("time"), int | float):
            return file_status.st_mtime - float(row["time"])
    return None


def parse_row(line: str) -> dict[str, Any] | None:
    """Parse a line of metrics.jsonl. Return None if the line is damaged, for example by a full disk."""
    row = parse_json(line)
    return row if is_row(row) else None


def follow_lines(path: Path, closed: threading.Event) -> Iterator[str | None]:
    """Yield the lines of a growing file until `closed` is set.

    Yields None each time all currently available lines have been yielded.
    """
    position = 0
    text = ""
    while True:
        is_last = closed.wait(POLL_SECONDS)
        if path.exists():
            with open(path, errors="replace") as file:
                file.seek(position)
                text += file.read()
                position = file.tell()
        *lines, text = text.split("\n")
        yield from lines
        if is_last:
            return
        yield None


def track_online(folder: RunFolder, closed: threading.Event) -> int:
    """Send the rows of a run while the run is training. Return the exit status of this process."""
    while not folder.metrics_file.exists() and not closed.wait(POLL_SECONDS):
        pass  # importing wandb must not slow down the first step
    note = read_note(folder)
    was_online = note is not None and note.online
    mode, reason = choose_mode("online")
    if mode == "offline":
        if was_online:
            raise ConnectionError(reason)
        record_offline_reason(folder, reason)
        return NO_HOST
    if not folder.attempt_folder.exists():  # the folder was moved or deleted, and W&B would recreate it
        return 1
    try:
        run = init_wandb_run(folder, "online", folder.path)
    except Exception as error:
        if was_online:
            raise
        record_offline_reason(folder, f"W&B could not start the run: {summarize_error(error)}")
        return NO_HOST
    wandb_scratch.record_client_processes(folder)
    status = {"id": run.id, "mode": "online", "reason": "", "url": run.url, "dir": str(Path(run.dir).parent)}
    write_json(folder.path / "wandb" / "status.json", status)
    forwarder = RowForwarder(folder, run, Journal(folder))
    forwarder.forward_ended_attempts()
    forwarder.forward_growing_attempt(follow_lines(folder.metrics_file, closed))
    forwarder.finish()
    forwarder.write_notes()
    return 0


def record_offline_reason(folder: RunFolder, reason: str) -> None:
    """Record why a run is tracked offline. Raises UserError if writing fails."""
    status = read_json(folder.path / "wandb" / "status.json")
    write_json(folder.path / "wandb" / "status.json", status | {"mode": "offline", "reason": reason})


def convert_to_offline_run(folder: RunFolder) -> int:
    """Create an offline W&B run from the missing rows of a run that has ended.

    Returns the exit status of this process.
    """
    from common.runs.tracking.offline_folder import choose_offline_path  # training does not need this module

    staging = wandb_scratch.get_staging_folder(folder)
    staging.mkdir()
    run = init_wandb_run(folder, "offline", staging)
    wandb_scratch.record_client_processes(folder)
    forwarder = RowForwarder(folder, run, None)
    forwarder.forward_ended_attempts()
    forwarder.finish()
    offline_folder = Path(run.dir).parent
    contents = {number: asdict(note) for number, note in forwarder.notes.items() if not note.online}
    write_json(offline_folder / NOTE_FILE, contents)
    final_path = choose_offline_path(folder.path / "wandb", offline_folder.name)
    offline_folder.rename(final_path)  # from now on, the conversion is in effect
    forwarder.write_notes()
    status = read_json(folder.path / "wandb" / "status.json")
    status |= {"id": run.id, "mode": "offline", "dir": str(final_path)}
    write_json(folder.path / "wandb" / "status.json", status)
    return 0


class Deadline:
    """Time limit of the tracking process, counted from when the process that started it exits or closes stdin."""

    def __init__(self, folder: RunFolder, end_time: float) -> None:
        """`end_time` is a time of the monotonic clock, or 0 if it is not known yet."""
        self.folder = folder
        self.end_time = end_time
        self.has_lock = False
        self.closed = threading.Event()
        self.exit_lock = threading.Lock()

    def exit_after_owner(self, seconds: float, *, follow: bool) -> None:
        """Set `closed` when stdin closes, and exit this process `seconds` later.

        If `follow` is false, `closed` is set immediately.
        """
        if follow:
            sys.stdin.read()
            if not self.folder.result:  # the owner was killed; its ranks may still write until they exit
                time.sleep(POLL_SECONDS)
        self.end_time = self.end_time or time.monotonic() + seconds
        self.closed.set()
        time.sleep(max(0.0, self.end_time - time.monotonic()))
        self.clean_up_and_exit(TIMED_OUT)

    def clean_up_and_exit(self, status: int) -> NoReturn:
        """Kill the W&B client, remove its temporary folders and exit this process.

        The exit status is that of the first call. An error that the killed client causes does not replace it.
        """
        self.exit_lock.acquire()  # never released, so that other threads wait for the exit
        kill_children()
        if self.has_lock:
            wandb_scratch.remove_temporary_state(self.folder)
        sys.stderr.flush()
        os._exit(status)


def main(path: str, number: str, mode: str, seconds: str, restarts: str = "0", end_time: str = "0") -> None:
    """Send the missing rows of a run to W&B.

    If the W&B client was killed, this process is restarted.
    """
    for signal_number in (signal.SIGTERM, signal.SIGUSR2):  # SLURM sends its signals to every process of a job
        signal.signal(signal_number, signal.SIG_IGN)
    os.nice(10)  # training has priority
    adopt_orphans()  # the helper processes of W&B leave child processes behind
    folder = RunFolder(Path(path), int(number))
    (folder.path / "wandb").mkdir(exist_ok=True)
    deadline = Deadline(folder, float(end_time))
    follow = {"follow": mode == "online"}
    watch = threading.Thread(target=deadline.exit_after_owner, args=(float(seconds),), kwargs=follow, daemon=True)
    watch.start()
    with wandb_scratch.hold_tracking_lock(folder):
        deadline.has_lock = True
        wandb_scratch.remove_temporary_state(folder)
        temporary = wandb_scratch.open_temporary_folder(folder)
        try:
            status = forward_missing_rows(folder, mode, deadline)
        except Exception as error:  # noqa: BLE001 (W&B may raise anything; the traceback goes to the log)
            if int(restarts) < MAX_RESTARTS and is_connection_lost(error):
                print(f"restarting the W&B client because it has exited: {summarize_error(error)}", file=sys.stderr)
                arguments = [path, number, mode, seconds, str(int(restarts) + 1), str(deadline.end_time)]
                restart_this_process(arguments, folder, temporary)
            traceback.print_exc()
            status = 1
        deadline.clean_up_and_exit(status)


def forward_missing_rows(folder: RunFolder, mode: str, deadline: Deadline) -> int:
    """Send the missing rows to W&B and shut down the W&B client. Return the exit status of this process."""
    restore_notes_of_offline_folders(folder)
    if read_note(folder) is None:
        write_note(folder, TrackingNote())
    if mode == "online":
        status = track_online(folder, deadline.closed)
    elif list_incomplete_notes(folder):
        status = convert_to_offline_run(folder)
    else:  # another process has already sent everything
        return 0
    shut_down_wandb()
    return status


def restart_this_process(arguments: list[str], folder: RunFolder, temporary: Path) -> NoReturn:
    """Replace this process with a new one after a delay that doubles with each restart."""
    sys.stderr.flush()
    kill_children()
    wandb_scratch.remove_temporary_state(folder)
    time.sleep(POLL_SECONDS * 2 ** int(arguments[4]))
    os.environ.pop(SERVICE, None)
    os.environ["TMPDIR"] = str(temporary.parent)
    os.execv(sys.executable, [sys.executable, "-m", "common.runs.tracking.wandb_process", *arguments])


def is_connection_lost(error: Exception) -> bool:
    """Return whether an error occurred because the W&B client was killed."""
    return isinstance(error, ConnectionError) or type(error).__name__ in LOST_CLIENT_ERRORS


def shut_down_wandb() -> None:
    """Shut down the helper process of W&B."""
    import wandb

    wandb.teardown()


if __name__ == "__main__":
    main(*sys.argv[1:])
