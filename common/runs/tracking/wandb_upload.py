"""Send the missing rows of runs that have ended to W&B, for `make sync`. This module does not import torch."""

from __future__ import annotations

import contextlib
import subprocess

from common.runs.folder import RunFolder, convert_disk_errors
from common.runs.tracking import wandb_scratch
from common.runs.tracking.wandb_rows import read_notes
from common.runs.tracking.wandb_tracker import (
    describe_incomplete_tracking,
    has_missing_online_rows,
    kill_tracking_process,
    remove_tracking_leftovers,
    start_tracking_process,
)
from common.system.errors import UserError

SYNC_SECONDS = 3600.0
"""Time limit, in seconds, for `make sync` to send one run. The next call restarts an interrupted conversion."""


def is_tracked_now(folder: RunFolder) -> bool:
    """Return whether a tracking process on this machine is currently tracking a run."""
    if not (folder.path / "wandb" / "lock").exists():
        return False
    with contextlib.suppress(OSError), wandb_scratch.hold_tracking_lock(folder, wait=False) as is_free:
        return not is_free
    return False  # the run belongs to another user


def send_missing_rows(folder: RunFolder) -> None:
    """Send to W&B the missing rows of a run that has ended.

    If the run was online, the rows are sent to the W&B host. Otherwise, the rows are written to an offline folder.
    Raises UserError if rows are still missing or the run folder cannot be written.
    """
    mode = "online" if has_missing_online_rows(folder) else "offline"
    newest = RunFolder(folder.path, max(read_notes(folder)))
    with convert_disk_errors(newest.attempt_folder):
        process = start_tracking_process(newest, mode, subprocess.DEVNULL, SYNC_SECONDS)
    try:
        status = process.wait()
    finally:
        kill_tracking_process(process)
        remove_tracking_leftovers(folder)
    problem = describe_incomplete_tracking(status, SYNC_SECONDS)
    if problem:
        log = newest.attempt_folder / "logs" / "tracker.log"
        raise UserError(f"rows of {folder.path.name} are missing from W&B; {problem}; see {log}")
