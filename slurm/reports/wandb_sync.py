"""The `sync` and `leet` commands: send offline runs to W&B, or open W&B's terminal viewer. Does not import torch.

Rows that W&B lacks because a process was killed are added first. A run with several offline attempts may have several
folders, all with the same W&B id. W&B's client sends these folders in order. The client asks the server how much of
the run has already arrived, and marks each folder that has been fully sent.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from common.runs.folder import RunFolder
from common.runs.tracking import wandb_account, wandb_rows, wandb_tracker
from common.system.errors import UserError
from slurm.arguments import parse_zero_or_one
from slurm.reports import selection, status
from slurm.reports.selection import RunFilter

START_TIME = re.compile(r"\d{8}_\d{6}")  # part of the name of an attempt's W&B folder
UNKNOWN_TIME = "00000000_000000"
WANDB = Path(sys.executable).with_name("wandb")


def list_offline_folders(folder: RunFolder) -> list[Path]:
    """List the W&B folders of a run's offline attempts, oldest first."""
    return sorted(path.parent for path in folder.path.glob("wandb/offline-run-*/*.wandb"))


def is_folder_sent(path: Path) -> bool:
    """Return whether W&B's client has marked a folder as sent completely."""
    return any(path.glob("*.wandb.synced"))


def list_unsent_folders(folders: list[RunFolder]) -> list[Path]:
    """List the W&B folders of offline attempts that have not been sent yet."""
    paths = []
    for folder in folders:
        paths += [path for path in list_offline_folders(folder) if not is_folder_sent(path)]
    return paths


def describe_pending_writes(folder: RunFolder) -> str:
    """Explain why a run may still write to its W&B folder; empty if it has stopped writing."""
    state = status.read_state(folder)[0]
    if state not in status.FINAL_STATES:
        return state
    return "its W&B process is still running" if wandb_tracker.is_tracked_now(folder) else ""


def send_runs_to_wandb(folders: list[RunFolder], dry: bool) -> int:
    """Send unsent data of runs to W&B, or only list it if `dry` is true.

    Returns the exit status. Raises UserError.
    """
    incomplete: list[RunFolder] = []  # runs with rows that W&B lacks
    selected: list[RunFolder] = []
    for folder in folders:
        is_incomplete = bool(wandb_rows.list_incomplete_notes(folder))
        if not is_incomplete and not list_unsent_folders([folder]):
            continue
        activity = describe_pending_writes(folder)
        if activity:
            print(f"skipped {folder.path.name}: the run is not over yet ({activity})")
            continue
        selected.append(folder)
        if is_incomplete:
            incomplete.append(folder)
    if dry or not selected:
        lines = [f"{folder.path}/wandb: missing rows will be read from metrics.jsonl first" for folder in incomplete]
        lines += map(str, list_unsent_folders(selected))
        print("\n".join(lines) or "nothing to send: no run was tracked offline, or all runs have been sent")
        return 0
    wandb_account.require_account()
    for folder in incomplete:
        wandb_tracker.send_missing_rows(folder)
    unsent = list_unsent_folders(selected)
    if not unsent:
        print("sent the missing rows of online runs")
        return 0
    process = subprocess.run([WANDB, "sync", "--yes", "-n", "1", *unsent], check=False)
    refused = [path for path in unsent if not is_folder_sent(path)]
    print(f"sent {len(unsent) - len(refused)} of {len(unsent)} W&B folders")
    if refused:
        raise UserError(f"W&B did not accept {refused[0]}; to send only the missing data, run make sync again")
    return process.returncode


def link_tracked_attempts(folders: list[RunFolder], merged: Path) -> int:
    """Create links to the W&B logs of all attempts in the folder `merged`; return the number of links.

    The viewer requires one folder. It lists subfolders named run-<time>-<W&B id> and reads run-<W&B id>.wandb in each.
    In the names of the links, the short run id, the experiment and the number of the log replace the W&B id.
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


def open_wandb_viewer(folders: list[RunFolder]) -> int:
    """Open W&B's terminal viewer for the runs; return the viewer's exit status. Raises UserError."""
    for folder in folders:
        needs_server = wandb_tracker.has_missing_online_rows(folder)
        if wandb_rows.list_incomplete_notes(folder) and not needs_server and not describe_pending_writes(folder):
            wandb_tracker.send_missing_rows(folder)
    with tempfile.TemporaryDirectory() as merged:
        if not link_tracked_attempts(folders, Path(merged)):
            raise UserError(
                "W&B has no record of these runs because they ran with WANDB_MODE=disabled or are not over yet; "
                "to compare them without W&B: make compare"
            )
        return subprocess.run([WANDB, "leet", merged], check=False).returncode


def main(args: argparse.Namespace) -> int:
    """Send runs to W&B, or open W&B's viewer for them; return the exit status."""
    dry = args.verb == "sync" and parse_zero_or_one("DRY_RUN", args.dry_run)
    criteria = RunFilter(args.runs, args.name, args.last, args.where, args.sweep)
    folders = selection.select_runs(criteria, Path(args.runs_folder or "runs"), newest=0)
    return open_wandb_viewer(folders) if args.verb == "leet" else send_runs_to_wandb(folders, dry)
