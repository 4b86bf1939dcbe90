"""The verbs `sync` and `leet`: send runs that were tracked offline to W&B, or open its viewer. Imports no torch.

Rows that W&B misses because a process was killed are passed on first. A run with several offline attempts may have
several folders, all with the same W&B id. W&B's client sends them in order, asks the server how much of the run it has
already, and notes beside each folder what was sent.
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
from common.runs.folder import RunFolder
from slurm.arguments import parse_switch
from slurm.reports import selection, status
from slurm.reports.selection import RunFilter

START_TIME = re.compile(r"\d{8}_\d{6}")  # in the name of an attempt's W&B folder
UNKNOWN_TIME = "00000000_000000"
WANDB = Path(sys.executable).with_name("wandb")


def list_offline_folders(folder: RunFolder) -> list[Path]:
    """List the W&B folders of a run's offline attempts, in order."""
    return sorted(path.parent for path in folder.path.glob("wandb/offline-run-*/*.wandb"))


def is_sent(path: Path) -> bool:
    """Check for the note of W&B's client that the whole folder was sent."""
    return any(path.glob("*.wandb.synced"))


def list_unsent_folders(folders: list[RunFolder]) -> list[Path]:
    """List the W&B folders of offline attempts that were not sent yet."""
    paths = []
    for folder in folders:
        paths += [path for path in list_offline_folders(folder) if not is_sent(path)]
    return paths


def describe_activity(folder: RunFolder) -> str:
    """Describe why a run may still write to its W&B folder; empty if it does not."""
    state = status.read_state(folder)[0]
    if state not in status.FINAL_STATES:
        return state
    return "its W&B process is still running" if wandb_tracker.is_tracked_now(folder) else ""


def send_runs(folders: list[RunFolder], dry: bool) -> int:
    """Send what was not sent yet, or list it with `dry`; returns the exit status. Raises UserError."""
    incomplete: list[RunFolder] = []  # W&B misses rows of these
    selected: list[RunFolder] = []
    for folder in folders:
        is_incomplete = bool(wandb_rows.list_incomplete_notes(folder))
        if not is_incomplete and not list_unsent_folders([folder]):
            continue
        activity = describe_activity(folder)
        if activity:
            print(f"{folder.path.name} is not over yet ({activity}): skipped")
            continue
        selected.append(folder)
        if is_incomplete:
            incomplete.append(folder)
    if dry or not selected:
        lines = [f"{folder.path}/wandb: created from metrics.jsonl first" for folder in incomplete]
        lines += map(str, list_unsent_folders(selected))
        print("\n".join(lines) or "nothing to send: no run was tracked offline, or all were sent")
        return 0
    wandb_account.require_account()
    for folder in incomplete:
        wandb_tracker.send_missing_rows(folder)
    unsent = list_unsent_folders(selected)
    if not unsent:
        print("sent the missing rows of online runs")
        return 0
    process = subprocess.run([WANDB, "sync", "--yes", "-n", "1", *unsent], check=False)
    refused = [path for path in unsent if not is_sent(path)]
    print(f"sent {len(unsent) - len(refused)} of {len(unsent)}")
    if refused:
        raise UserError(f"W&B did not accept {refused[0]}; run make sync again: it sends only what is missing")
    return process.returncode


def link_tracked_attempts(folders: list[RunFolder], merged: Path) -> int:
    """Link the attempts that W&B tracked into one folder, as its viewer requires; returns their number.

    The viewer lists folder names of the form run-<time>-<W&B id>, and reads run-<W&B id>.wandb in each. The links
    replace the W&B id by the end of the run's id, its experiment, and the number of the log.
    """
    count = 0
    for folder in folders:
        short_id = folder.path.name.rpartition("-")[2]
        logs = [log for log in folder.path.glob("wandb/*run-*/*.wandb") if not log.parent.is_symlink()]
        for number, log in enumerate(sorted(logs), 1):
            start = START_TIME.search(log.parent.name)
            name = f"{short_id}-{folder.experiment}-{number}"
            link_folder = merged / f"run-{start[0] if start else UNKNOWN_TIME}-{name}"
            link_folder.mkdir()
            (link_folder / f"run-{name}.wandb").symlink_to(log.absolute())
            count += 1
    return count


def open_viewer(folders: list[RunFolder]) -> int:
    """Open W&B's terminal viewer on the runs; returns its exit status. Raises UserError."""
    for folder in folders:
        needs_server = wandb_tracker.misses_online_rows(folder)
        if wandb_rows.list_incomplete_notes(folder) and not needs_server and not describe_activity(folder):
            wandb_tracker.send_missing_rows(folder)
    with tempfile.TemporaryDirectory() as merged:
        if not link_tracked_attempts(folders, Path(merged)):
            raise UserError(
                "W&B has no record of these runs: they ran with WANDB_MODE=disabled, or are not over yet; "
                "make compare shows them"
            )
        return subprocess.run([WANDB, "leet", merged], check=False).returncode


def main(args: argparse.Namespace) -> int:
    """Send runs to W&B, or open its viewer on them; returns the exit status."""
    dry = args.verb == "sync" and parse_switch("DRY_RUN", args.dry_run)
    criteria = RunFilter(args.runs, args.name, args.last, args.where, args.sweep)
    folders = selection.select_runs(criteria, Path(args.runs_folder or "runs"), newest=0)
    return open_viewer(folders) if args.verb == "leet" else send_runs(folders, dry)
