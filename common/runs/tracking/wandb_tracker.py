"""Start and stop the tracking process of a run, which sends the run's metrics to Weights & Biases.

Training never waits for W&B and never fails because of W&B. In online mode, a separate process follows metrics.jsonl
while the run trains. In offline mode, W&B does not run until training has ended. A separate process then converts
metrics.jsonl to an offline W&B run. If a tracking process is killed, the next attempt or `make sync` sends the missing
rows. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time

from common.runs.folder import RunFolder, convert_disk_errors, read_json
from common.runs.tracking import wandb_scratch
from common.runs.tracking.wandb_account import find_missing_account, read_requested_mode
from common.runs.tracking.wandb_process import NO_HOST, SERVICE, TIMED_OUT, record_offline_reason
from common.runs.tracking.wandb_rows import TrackingNote, list_incomplete_notes, read_note, write_note
from common.system.errors import UserError
from configs.shared import Experiment

MODULE = "common.runs.tracking.wandb_process"


class Tracker:
    """Handle with which the process that controls a run starts and ends the tracking of the run."""

    def __init__(self, folder: RunFolder, process: subprocess.Popen[bytes] | None) -> None:
        """`process` is the tracking process that follows the run, or None in offline mode."""
        self.folder = folder
        self.process = process

    @classmethod
    def start(cls, cfg: Experiment, folder: RunFolder) -> Tracker | None:
        """Start tracking a run. Return None if tracking is disabled or cannot be started."""
        mode = read_requested_mode(cfg)
        if mode == "disabled":
            return None
        reason = "" if mode == "offline" else find_missing_account()
        try:
            with convert_disk_errors(folder.path / "wandb"):
                (folder.path / "wandb").mkdir(exist_ok=True)
            if read_note(folder) is None:
                write_note(folder, TrackingNote())
            if mode != "offline" and not reason:
                process = start_tracking_process(folder, "online", subprocess.PIPE, cfg.wandb.finish_timeout)
                return cls(folder, process)
            record_offline_reason(folder, reason)
        except (OSError, UserError) as error:
            print(f"W&B: tracking could not be started: {error}", flush=True)
            return None
        return cls(folder, None)

    def finish(self, timeout: float) -> str:
        """Send the remaining rows to W&B for at most `timeout` seconds.

        Returns a one-line message that names the W&B run.
        """
        deadline = time.monotonic() + timeout
        problem = ""
        status = NO_HOST
        try:
            if self.process is not None:
                assert self.process.stdin is not None
                self.process.stdin.close()
                status = wait_for_tracking_process(self.process, deadline)
            if status == NO_HOST:
                seconds = deadline - time.monotonic()
                self.process = start_tracking_process(self.folder, "offline", subprocess.DEVNULL, seconds)
                status = wait_for_tracking_process(self.process, deadline)
            problem = describe_incomplete_tracking(status, timeout)
        except KeyboardInterrupt:
            problem = "tracking is incomplete: stopped by Ctrl-C"
        except OSError as error:
            problem = f"tracking is incomplete: {error}"
        self.kill()
        return self.describe(problem)

    def kill(self) -> None:
        """Kill the tracking process, if there is one, and remove its temporary files."""
        if self.process is not None:
            kill_tracking_process(self.process)
        remove_tracking_leftovers(self.folder)

    def describe(self, problem: str) -> str:
        """Return a one-line message that names the W&B run and, if rows are missing, the problem."""
        log = self.folder.attempt_folder / "logs" / "tracker.log"
        status = read_json(self.folder.path / "wandb" / "status.json")
        if not status:
            return f"W&B: nothing was tracked; see {log}"
        # The reference is quoted twice, because RUNS is split into words.
        quoted_reference = shlex.quote(shlex.quote(self.folder.reference))
        sync = f"make sync RUNS={quoted_reference}"
        if status["mode"] == "online" and problem:
            return f"W&B: {status['url']}; {problem}, see {log}. Upload the remaining rows with: {sync}"
        if status["mode"] == "online":
            return f"W&B: {status['url']}"
        reason = f" ({status['reason']})" if status.get("reason") else ""
        missing = f"; {problem}, see {log}" if problem else ""
        return f"W&B: offline{reason}; upload the run with: {sync}{missing}"


def start_tracking_process(folder: RunFolder, mode: str, stdin: int, seconds: float) -> subprocess.Popen[bytes]:
    """Start the tracking process of an attempt. Raises OSError if the process cannot be started.

    The process exits at most `seconds` after `stdin` closes. In offline mode, the time limit starts immediately.
    """
    # W&B's error reporting is telemetry that delays the end of a run by ten seconds if the host does not respond.
    environ = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"} | os.environ
    environ["PYTHONSAFEPATH"] = "1"  # `python -m` must not import modules from the current folder
    for name in ("WANDB_MODE", SERVICE):
        environ.pop(name, None)
    arguments = [str(folder.path), str(folder.number), mode, str(max(0.0, seconds))]
    command = [sys.executable, "-m", MODULE, *arguments]
    with open(folder.attempt_folder / "logs" / "tracker.log", "ab") as log:
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=log,
            stderr=log,
            env=environ,
            start_new_session=True,  # Ctrl-C does not reach the process, and its process group can be killed
        )


def wait_for_tracking_process(process: subprocess.Popen[bytes], deadline: float) -> int:
    """Return the exit status of a tracking process, or TIMED_OUT one second after the deadline."""
    try:
        return process.wait(max(0.0, deadline - time.monotonic()) + 1)
    except subprocess.TimeoutExpired:
        return TIMED_OUT


def kill_tracking_process(process: subprocess.Popen[bytes]) -> None:
    """Kill a tracking process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def remove_tracking_leftovers(folder: RunFolder) -> None:
    """Remove the temporary files of a killed tracking process if no other process tracks the run."""
    with contextlib.suppress(OSError), wandb_scratch.hold_tracking_lock(folder, wait=False) as is_free:
        if is_free:
            wandb_scratch.remove_temporary_state(folder)


def describe_incomplete_tracking(status: int, timeout: float) -> str:
    """Return why a tracking process with this exit status has not sent all rows.

    Returns an empty string if all rows were sent.
    """
    if status == TIMED_OUT:
        return f"tracking did not complete within {timeout:g} s"
    if status < 0:
        return f"tracking is incomplete: the tracking process was killed by {signal.Signals(-status).name}"
    if status > 0:
        return f"tracking is incomplete: the tracking process failed with exit status {status}"
    return ""


def has_missing_online_rows(folder: RunFolder) -> bool:
    """Return whether rows of an online run are missing from the W&B host."""
    return any(note.online for note in list_incomplete_notes(folder))
