"""Tracking by Weights & Biases, for the owner of a run: when W&B's processes start and end. Imports no torch.

Training never waits for W&B and cannot fail with it. Where W&B is online, a process of its own follows metrics.jsonl
while the run trains. Offline nothing of W&B runs until training is over; a process then converts metrics.jsonl. What
W&B misses because a process was killed is passed on by the next attempt or by `make sync`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time

from common.core.errors import UserError
from common.runs import wandb_scratch
from common.runs.folder import Folder, disk_errors, read_json
from common.runs.wandb_account import find_missing_account, read_requested_mode
from common.runs.wandb_process import NO_HOST, SERVICE, TIMED_OUT, note_offline
from common.runs.wandb_rows import Note, find_incomplete, read_note, read_notes, write_note
from configs.shared import Experiment

MODULE = "common.runs.wandb_process"
SYNC_SECONDS = 3600.0
"""Limit of `make sync` for one run; a conversion that is cut off would begin again with the next call."""


class Tracker:
    """Handle of a run's tracking for its owner."""

    def __init__(self, folder: Folder, process: subprocess.Popen[bytes] | None) -> None:
        """`process` follows the run; None offline."""
        self.folder, self.process = folder, process

    @classmethod
    def start(cls, cfg: Experiment, folder: Folder) -> Tracker | None:
        """Start tracking, or return None where it is switched off or cannot be started."""
        mode = read_requested_mode(cfg)
        if mode == "disabled":
            return None
        reason = "" if mode == "offline" else find_missing_account()
        try:
            with disk_errors(folder.path / "wandb"):
                (folder.path / "wandb").mkdir(exist_ok=True)
            if read_note(folder) is None:
                write_note(folder, Note())
            if mode != "offline" and not reason:
                return cls(folder, start_process(folder, "online", subprocess.PIPE, cfg.wandb.finish_timeout))
            note_offline(folder, reason)
        except (OSError, UserError) as error:
            print(f"W&B: nothing is tracked: {error}", flush=True)
            return None
        return cls(folder, None)

    def finish(self, timeout: float) -> str:
        """Let W&B get the rest, for at most `timeout` seconds; return one line that names the W&B run."""
        deadline = time.monotonic() + timeout
        problem = ""
        status = NO_HOST
        try:
            if self.process is not None:
                assert self.process.stdin is not None
                self.process.stdin.close()
                status = wait_for_process(self.process, deadline)
            if status == NO_HOST:
                self.process = start_process(self.folder, "offline", subprocess.DEVNULL, deadline - time.monotonic())
                status = wait_for_process(self.process, deadline)
            problem = describe_process_end(status, timeout)
        except KeyboardInterrupt:
            problem = "not complete: stopped by Ctrl-C"
        except OSError as error:
            problem = f"not complete: {error}"
        self.kill()
        return self.describe(problem)

    def kill(self) -> None:
        """End the tracking process at once, if there is one, and remove its temporary files."""
        if self.process is not None:
            end_process(self.process)
        remove_leftovers(self.folder)

    def describe(self, problem: str) -> str:
        """Return one line that names the W&B run and says what is missing in it."""
        log = self.folder.attempt / "logs" / "tracker.log"
        status = read_json(self.folder.path / "wandb" / "status.json")
        if not status:
            return f"W&B: nothing was tracked; see {log}"
        words = shlex.quote(shlex.quote(self.folder.reference))  # RUNS is split into words
        sync = f"make sync RUNS={words}"
        missing = f"; {problem}, see {log}" if problem else ""
        if status["mode"] == "online":
            return f"W&B: {status['url']}" + (f"{missing}; send the rest with: {sync}" if problem else "")
        reason = f" ({status['reason']})" if status.get("reason") else ""
        return f"W&B: offline{reason}; send it with: {sync}{missing}"


def start_process(folder: Folder, mode: str, stdin: int, seconds: float) -> subprocess.Popen[bytes]:
    """Start the tracking process of an attempt, which ends itself `seconds` after `stdin` has closed or, offline, now.

    Raises OSError.
    """
    # observability is W&B's own telemetry: ten seconds at the end where the host does not answer
    environ = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"} | os.environ
    for name in ("WANDB_MODE", SERVICE):
        environ.pop(name, None)
    command = [sys.executable, "-m", MODULE, str(folder.path), str(folder.number), mode, str(max(0.0, seconds))]
    with open(folder.attempt / "logs" / "tracker.log", "ab") as log:
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=log,
            stderr=log,
            env=environ,
            start_new_session=True,  # Ctrl-C is not for it, and its group can be ended as one
        )


def wait_for_process(process: subprocess.Popen[bytes], deadline: float) -> int:
    """Return the exit status of a tracking process; TIMED_OUT where it takes a second more than it is allowed."""
    try:
        return process.wait(max(0.0, deadline - time.monotonic()) + 1)
    except subprocess.TimeoutExpired:
        return TIMED_OUT


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Kill a tracking process and its children as far as they are left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def remove_leftovers(folder: Folder) -> None:
    """Remove temporary files of a tracking process that was killed, unless another one works on the run."""
    with contextlib.suppress(OSError), wandb_scratch.locked_tracking(folder, wait=False) as is_free:
        if is_free:
            wandb_scratch.remove_scratch(folder)


def describe_process_end(status: int, timeout: float) -> str:
    """Describe why a tracking process with this exit status has not passed on everything; empty where it has."""
    if status == TIMED_OUT:
        return f"not complete after {timeout:g} s"
    if status < 0:
        return f"not complete: the tracking process was killed by {signal.Signals(-status).name}"
    return f"not complete: the tracking process failed with exit status {status}" if status else ""


def is_tracked_now(folder: Folder) -> bool:
    """Check whether a tracking process works on a run, on this machine."""
    if not (folder.path / "wandb" / "lock").exists():
        return False
    with contextlib.suppress(OSError), wandb_scratch.locked_tracking(folder, wait=False) as is_free:
        return not is_free
    return False  # another user's run


def misses_online_rows(folder: Folder) -> bool:
    """Check whether a run was online and W&B's host does not have all of it."""
    return any(note.online for note in find_incomplete(folder))


def pass_on_missing(folder: Folder) -> None:
    """Give W&B what it misses of a run that is over: its host if the run was online, else an offline folder.

    Raises UserError where W&B does not get all of it, or the run folder cannot be written.
    """
    mode = "online" if misses_online_rows(folder) else "offline"
    newest = Folder(folder.path, max(read_notes(folder)))
    with disk_errors(newest.attempt):
        process = start_process(newest, mode, subprocess.DEVNULL, SYNC_SECONDS)
    try:
        status = process.wait()
    finally:
        end_process(process)
        remove_leftovers(folder)
    problem = describe_process_end(status, SYNC_SECONDS)
    if problem:
        log = newest.attempt / "logs" / "tracker.log"
        raise UserError(f"W&B did not get all of {folder.path.name}: {problem}; see {log}")
