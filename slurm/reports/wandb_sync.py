"""The `sync` and `leet` commands: send offline runs to W&B, or open W&B's terminal viewer.

If a tracking process was killed, W&B lacks rows of the run. The commands first read these rows from metrics.jsonl. A
run with several offline attempts may have several offline folders, all with the same W&B id. W&B's client sends these
folders in order. The client asks the server how much of the run has already arrived, and marks each folder that was
sent completely. This module does not import torch.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from common.runs.folder import RunFolder
from common.runs.tracking import wandb_account, wandb_rows, wandb_tracker, wandb_upload
from common.system.errors import UserError
from slurm.arguments import parse_zero_or_one
from slurm.reports import liveness, selection, status
from slurm.reports.selection import RunFilter

START_TIME = re.compile(r"\d{8}_\d{6}")  # date and time in the name of an attempt's W&B folder
UNKNOWN_TIME = "00000000_000000"
WANDB = Path(sys.executable).with_name("wandb")  # W&B's command-line client


def list_offline_folders(folder: RunFolder) -> list[Path]:
    """Return the W&B folders of a run's offline attempts, oldest first."""
    return sorted(path.parent for path in folder.path.glob("wandb/offline-run-*/*.wandb"))


def is_folder_sent(path: Path) -> bool:
    """Return whether W&B's client has marked an offline folder as completely sent."""
    return any(path.glob("*.wandb.synced"))


def list_unsent_folders(folders: list[RunFolder]) -> list[Path]:
    """Return the W&B folders of offline attempts that have not been sent completely."""
    paths = []
    for folder in folders:
        paths += [path for path in list_offline_folders(folder) if not is_folder_sent(path)]
    return paths


def describe_pending_writes(folder: RunFolder) -> str:
    """Return why a run may still write to its W&B folder, or an empty string if the run has stopped writing."""
    state, detail = status.read_state(folder)
    if state == "UNKNOWN":
        return f"it is not known whether the run has ended ({detail}); run make sync again when SLURM answers"
    if state not in status.FINAL_STATES:
        return f"the run has not ended yet ({state})"
    if liveness.is_stopping(folder):
        return "the run is still stopping"
    return "its tracking process is still running" if wandb_upload.is_tracked_now(folder) else ""


def send_runs_to_wandb(folders: list[RunFolder], dry: bool) -> int:
    """Send unsent data of runs to W&B, or list the data if `dry` is true.

    Returns the exit status. Raises UserError if there is no W&B account or W&B does not accept the data.
    """
    incomplete: list[RunFolder] = []  # selected runs with rows that W&B lacks
    selected: list[RunFolder] = []  # runs that have ended and have unsent data
    for folder in folders:
        is_incomplete = bool(wandb_rows.list_incomplete_notes(folder))
        if not is_incomplete and not list_unsent_folders([folder]):
            continue
        activity = describe_pending_writes(folder)
        if activity:
            print(f"skipped {folder.path.name}: {activity}")
            continue
        selected.append(folder)
        if is_incomplete:
            incomplete.append(folder)

    if dry or not selected:
        lines = [f"{folder.path}/wandb: rows that W&B lacks will be read from metrics.jsonl" for folder in incomplete]
        lines += map(str, list_unsent_folders(selected))
        print("\n".join(lines) or "nothing to send: no run was tracked offline, or all runs have been sent")
        return 0

    wandb_account.require_account()
    # The missing rows of an online run are sent to W&B. The missing rows of an offline run are written to a folder.
    failures = []
    for folder in incomplete:
        try:
            wandb_upload.send_missing_rows(folder)
        except UserError as error:
            print(f"skipped {folder.path.name}: {error}")
            failures.append(folder)
    selected = [folder for folder in selected if folder not in failures]

    unsent = list_unsent_folders(selected)
    if not unsent:
        if len(incomplete) > len(failures):
            print("sent the missing rows of online runs to W&B")
        return 1 if failures else 0
    process = subprocess.run([WANDB, "sync", "--yes", "-n", "1", *unsent], check=False)
    refused = [path for path in unsent if not is_folder_sent(path)]
    print(f"sent {len(unsent) - len(refused)} of {len(unsent)} W&B folders")
    if refused:
        raise UserError(f"W&B did not accept {refused[0]}; to send only the missing data, run make sync again")
    return 1 if failures else process.returncode


def link_wandb_logs(folders: list[RunFolder], merged: Path) -> int:
    """Link the W&B logs of runs into the folder `merged`, and return the link count.

    W&B's viewer reads a single folder. The viewer lists the subfolders named run-<time>-<W&B id>, and reads the file
    run-<W&B id>.wandb in each subfolder. In the names of the links, the short run id, the experiment and the number of
    the log replace the W&B id.
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
    """Open W&B's terminal viewer for runs, and return the viewer's exit status.

    Raises UserError if W&B has no record of the runs.
    """
    # Write the missing rows of ended offline runs to offline folders. The missing rows of online runs need a server.
    for folder in folders:
        needs_server = wandb_tracker.has_missing_online_rows(folder)
        if wandb_rows.list_incomplete_notes(folder) and not needs_server and not describe_pending_writes(folder):
            wandb_upload.send_missing_rows(folder)
    with tempfile.TemporaryDirectory() as merged:
        if not link_wandb_logs(folders, Path(merged)):
            raise UserError(
                "W&B has no record of these runs because they ran with WANDB_MODE=disabled or have not ended yet; "
                "to compare the runs without W&B: make compare"
            )
        return subprocess.run([WANDB, "leet", merged], check=False).returncode


def main(args: argparse.Namespace) -> int:
    """Send runs to W&B, or open W&B's viewer for runs, and return the exit status."""
    dry = args.verb == "sync" and parse_zero_or_one("DRY_RUN", args.dry_run)
    criteria = RunFilter.from_arguments(args)
    folders = selection.select_runs(criteria, Path(args.runs_folder or "runs"), newest=0)
    return open_wandb_viewer(folders) if args.verb == "leet" else send_runs_to_wandb(folders, dry)
