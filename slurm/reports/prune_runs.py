"""The `prune-runs` command: list or delete files that ended runs no longer need. This module does not import torch.

With DELETE=1, the command deletes checkpoints, traces, and W&B folders that have been sent. The command keeps settings,
results, metrics, logs and source code. The following checkpoints are deleted only if RUNS names the run: the
checkpoints of an unfinished run, which are needed to resume the run; the best checkpoint of a finished run
(checkpoint.best); and the newest checkpoint of a run without a trained model.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import shutil
import sys
from pathlib import Path

from common.checkpoint import storage
from common.runs.folder import MODEL_FILE, RunFolder, convert_disk_errors
from common.runs.run_lock import try_to_lock
from common.system.errors import UserError
from slurm.arguments import parse_zero_or_one
from slurm.reports import liveness, selection, status, wandb_sync
from slurm.reports.selection import RunFilter


def list_superfluous_files(folder: RunFolder, is_named: bool) -> list[Path]:
    """Return the files and folders that an ended run no longer needs.

    `is_named` is true if RUNS names the run. Otherwise, protected checkpoints are excluded: the best checkpoint
    (checkpoint.best) and, for a run without a trained model, the newest checkpoint.
    """
    paths = sorted(folder.path.glob("attempts/*/trace-*.json"))
    for attempt in folder.list_attempts():
        checkpoints = storage.get_checkpoints_dir(attempt)
        protected = [] if is_named else list_protected_checkpoints(folder, attempt)
        if protected:
            paths += [path for path in sorted(checkpoints.iterdir()) if path not in protected]
        elif checkpoints.exists():
            paths.append(checkpoints)
    return paths + [path for path in wandb_sync.list_offline_folders(folder) if wandb_sync.is_folder_sent(path)]


def list_protected_checkpoints(folder: RunFolder, attempt: RunFolder) -> list[Path]:
    """Return an attempt's checkpoints that contain the only or the best model of the run.

    The result also contains the file `best`, which names the best checkpoint.
    """
    checkpoints = storage.get_checkpoints_dir(attempt)
    protected = []
    if not (folder.path / MODEL_FILE).is_file():
        newest = storage.list_resumable_checkpoints(folder)[:1]
        protected += [checkpoint.path for checkpoint in newest if checkpoint.path.parent == checkpoints]
    best = storage.read_pointer_file(attempt, "best")
    if best is not None and (checkpoints / best).is_dir():
        protected += [checkpoints / best, checkpoints / "best"]
    return protected


def measure_size(path: Path) -> int:
    """Return the size of a file or folder in bytes. Links are not followed."""
    paths = [path]
    if path.is_dir() and not path.is_symlink():
        paths += path.rglob("*")
    return sum(path.lstat().st_blocks * 512 for path in paths)  # st_blocks counts units of 512 bytes


def remove_path(path: Path) -> None:
    """Delete a file or folder. Raises UserError if the disk is read-only or protected."""
    with convert_disk_errors(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove_superfluous_files(folders: list[RunFolder], are_named: bool, delete: bool) -> int:
    """Print the superfluous files of runs, and delete the files if `delete` is true.

    Returns the total size of the files in bytes.
    """
    total = 0
    for folder in folders:
        # The lock keeps other commands from resuming or pruning the run while its files are deleted.
        lock = try_to_lock(folder)
        with contextlib.nullcontext() if lock is None else lock:
            if can_be_pruned(folder, are_named, is_locked=lock is not None):
                total += remove_superfluous_files_of_run(folder, are_named, delete)
    return total


def can_be_pruned(folder: RunFolder, is_named: bool, is_locked: bool) -> bool:
    """Return whether files of a run may be deleted.

    If not, print why, unless the run is unfinished and RUNS does not name it. `is_locked` is true if this process holds
    the lock of the run.
    """
    state, _ = status.read_state(folder)
    # A run that ended in another state can be resumed from its checkpoints, so RUNS must name the run.
    if state != "FINISHED" and not is_named:
        return False
    problem = ""
    if state not in status.FINAL_STATES:
        problem = f"the run has not ended yet ({state})"
    elif is_named and liveness.is_stopping(folder):
        problem = "the run is still stopping"
    elif not is_locked:
        problem = "another command uses the run"
    if problem:
        print(f"skipped {folder.path.name}: {problem}")
    return not problem


def remove_superfluous_files_of_run(folder: RunFolder, is_named: bool, delete: bool) -> int:
    """Print the superfluous files of a run, and delete the files if `delete` is true.

    Returns the total size of the files in bytes.
    """
    paths = list_superfluous_files(folder, is_named)
    if not paths:
        return 0
    size = sum(map(measure_size, paths))
    names = ", ".join(str(path.relative_to(folder.path)) for path in paths)
    print(f"{folder.path.name}  {size / 1e6:.1f} MB  {names}")
    if delete:
        for path in paths:
            remove_path(path)
    return size


def parse_delete_switch(delete: str, dry_run: str) -> bool:
    """Return whether DELETE and DRY_RUN request the deletion of files.

    DRY_RUN=0 is deprecated and means DELETE=1. Raises UserError if the options are invalid or contradict each other.
    """
    is_dry = parse_zero_or_one("DRY_RUN", dry_run)
    if parse_zero_or_one("DELETE", delete):
        if is_dry:
            raise UserError("DELETE=1 and DRY_RUN=1 contradict each other; omit one of them")
        return True
    if dry_run == "0" and not delete:
        print("note: DRY_RUN=0 is deprecated; use DELETE=1", file=sys.stderr)
        return True
    return False


def format_deletion_command(args: argparse.Namespace) -> str:
    """Return the command that deletes the files that a command with these arguments lists."""
    filters = {"RUNS": args.runs, "NAME": args.name, "LAST": args.last, "WHERE": args.where}
    command = "make prune-runs"
    if args.runs_folder:  # make has no variable for this folder
        command = f"python -m slurm prune-runs --runs-folder={shlex.quote(args.runs_folder)}"
        filters = {f"--{name.lower()}": value for name, value in filters.items()}
    words = [f"{name}={shlex.quote(value)}" for name, value in filters.items() if value]
    return " ".join([command, *words, "--delete=1" if args.runs_folder else "DELETE=1"])


def main(args: argparse.Namespace) -> int:
    """List or delete files that ended runs no longer need, and return the exit status."""
    delete = parse_delete_switch(args.delete, args.dry_run)
    criteria = RunFilter.from_arguments(args)
    folders = selection.select_runs(criteria, Path(args.runs_folder or "runs"), newest=0)
    total = remove_superfluous_files(folders, bool(args.runs), delete)
    preview = f"would be freed; to delete the files: {format_deletion_command(args)}"
    print(f"{total / 1e6:.1f} MB {'freed' if delete else preview}")
    return 0
