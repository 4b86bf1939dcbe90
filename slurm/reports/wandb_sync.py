"""The verbs `sync` and `leet`: runs that were tracked offline, sent to W&B or shown in its viewer. Imports no torch.

What W&B misses of a run because a process was killed is passed on first. A run of several attempts without a network
may have several folders, all under one W&B id. W&B's client sends them in their order, asks the host how much it has of
the run already, and notes beside each what was sent.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from common.core.errors import UserError
from common.runs import wandb_account, wandb_rows, wandb_tracker
from common.runs.folder import Folder
from slurm.arguments import parse_switch
from slurm.reports import selection, status
from slurm.reports.selection import Choice

TIME = re.compile(r"\d{8}_\d{6}")  # in the name of W&B's folder of an attempt
UNKNOWN_TIME = "00000000_000000"
WANDB = Path(sys.executable).with_name("wandb")


def list_offline_folders(folder: Folder) -> list[Path]:
    """List the W&B folders of a run's offline attempts, in their order."""
    return sorted(path.parent for path in folder.path.glob("wandb/offline-run-*/*.wandb"))


def is_sent(path: Path) -> bool:
    """Check for the note of W&B's client that all of it was sent."""
    return any(path.glob("*.wandb.synced"))


def list_unsent_folders(folder: Folder) -> list[Path]:
    """List the W&B folders of a run's offline attempts that were not sent yet."""
    return [path for path in list_offline_folders(folder) if not is_sent(path)]


def describe_activity(folder: Folder) -> str:
    """Return the state of a run that is not over, or that W&B's client still works on; else nothing."""
    state = status.read_state(folder)[0]
    if state not in status.OVER:
        return state
    return "its W&B process still runs" if wandb_tracker.is_tracked_now(folder) else ""


def send_runs(folders: list[Folder], dry: bool) -> int:
    """Send what was not sent yet; returns the exit status. Raises UserError."""
    incomplete: list[Folder] = []
    chosen: list[Folder] = []
    for folder in folders:
        misses = bool(wandb_rows.find_incomplete(folder))
        if not misses and not list_unsent_folders(folder):
            continue
        reason = describe_activity(folder)
        if reason:
            print(f"{folder.path.name} is not over yet ({reason}): left for later")
            continue
        chosen.append(folder)
        if misses:
            incomplete.append(folder)
    if dry or not chosen:
        lines = [f"{folder.path}/wandb: made from metrics.jsonl first" for folder in incomplete]
        lines += [str(path) for folder in chosen for path in list_unsent_folders(folder)]
        print("\n".join(lines) or "nothing to send: no run was tracked offline, or all was sent")
        return 0
    wandb_account.require_account()
    for folder in incomplete:
        wandb_tracker.pass_on_missing(folder)
    waiting = [path for folder in chosen for path in list_unsent_folders(folder)]
    if not waiting:
        print("sent what was missing of runs that were online")
        return 0
    done = subprocess.run([WANDB, "sync", "--yes", "-n", "1", *waiting], check=False)
    left = [path for path in waiting if not is_sent(path)]
    print(f"sent {len(waiting) - len(left)} of {len(waiting)}")
    if left:
        raise UserError(f"W&B did not take {left[0]}; run make sync again, which sends only what is missing")
    return done.returncode


def link_tracked_attempts(folders: list[Folder], merged: Path) -> int:
    """Link the attempts that W&B tracked into one folder, as its viewer wants them; returns how many.

    The viewer lists the names of the folders, run-<time>-<W&B's id>, and reads run-<W&B's id>.wandb in each. Here the
    end of the run's own id, its experiment and the number of the log take the place of that id.
    """
    count = 0
    for folder in folders:
        short_id = folder.path.name.rpartition("-")[2]
        logs = sorted(folder.path.glob("wandb/*run-*/*.wandb"))
        for number, log in enumerate((log for log in logs if not log.parent.is_symlink()), 1):
            began = TIME.search(log.parent.name)
            name = f"{short_id}-{folder.experiment}-{number}"
            shown = merged / f"run-{began[0] if began else UNKNOWN_TIME}-{name}"
            shown.mkdir()
            (shown / f"run-{name}.wandb").symlink_to(log.absolute())
            count += 1
    return count


def open_viewer(folders: list[Folder]) -> int:
    """Open W&B's terminal viewer on the runs; returns its exit status. Raises UserError."""
    for folder in folders:
        needs_host = wandb_tracker.misses_online_rows(folder)
        if wandb_rows.find_incomplete(folder) and not needs_host and not describe_activity(folder):
            wandb_tracker.pass_on_missing(folder)
    with tempfile.TemporaryDirectory() as merged:
        if not link_tracked_attempts(folders, Path(merged)):
            raise UserError(
                "none of these runs has a record of W&B: they ran with WANDB_MODE=disabled, or are not over yet; "
                "make compare shows them"
            )
        return subprocess.run([WANDB, "leet", merged], check=False).returncode


def main(given: argparse.Namespace) -> int:
    """Send runs to W&B, or open its viewer on them; returns the exit status."""
    dry = given.verb == "sync" and parse_switch("DRY_RUN", given.dry_run)
    asked = Choice(given.runs, given.name, given.last, given.where, given.sweep)
    folders = selection.select_runs(asked, Path(given.runs_folder or "runs"), newest=0)
    return open_viewer(folders) if given.verb == "leet" else send_runs(folders, dry)
