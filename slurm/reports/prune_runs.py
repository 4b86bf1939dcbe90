"""The verb `prune-runs`: show or delete files that runs that are over no longer need. Imports no torch.

Only DELETE=1 deletes them: checkpoints, traces, and W&B's folders that were sent. Settings, results, metrics, logs and
source stay. A run that did not finish can be resumed from its checkpoints: they are deleted only if it is named, and so
are the best model of a finished run (checkpoint.best) and the newest checkpoint of one without a model.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from common.checkpoint import storage
from common.core.errors import UserError
from common.runs.folder import MODEL, Folder, disk_errors
from slurm.arguments import parse_switch
from slurm.reports import selection, status, wandb_sync
from slurm.reports.selection import Choice


def list_superfluous_files(folder: Folder, named: bool) -> list[Path]:
    """List the files of a run that is over that can be deleted.

    Unless the run is named, its best model stays (checkpoint.best), and its newest checkpoint where there is no other
    model of it.
    """
    found = sorted(folder.path.glob("attempts/*/trace-*.json"))
    only = (
        []
        if named or (folder.path / MODEL).is_file()
        else [one.path for one in storage.list_resumable_checkpoints(folder)[:1]]
    )
    for attempt in folder.attempts():
        saved = storage.checkpoints_dir(attempt)
        best = None if named else storage.read_pointer(attempt, "best")
        stay = [path for path in only if path.parent == saved]
        stay += [saved / best, saved / "best"] if best is not None and (saved / best).is_dir() else []
        if stay:
            found += [path for path in sorted(saved.iterdir()) if path not in stay]
        elif saved.exists():
            found.append(saved)
    return found + [path for path in wandb_sync.list_offline_folders(folder) if wandb_sync.is_sent(path)]


def measure_size(path: Path) -> int:
    """Measure bytes on the disk; links are not followed."""
    below = path.rglob("*") if path.is_dir() and not path.is_symlink() else ()
    return sum(one.lstat().st_blocks * 512 for one in (path, *below))


def remove_path(path: Path) -> None:
    """Delete a file or a folder. Raises UserError."""
    with disk_errors(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove_superfluous_files(folders: list[Folder], named: bool, delete: bool) -> int:
    """Show what can go, and delete it if asked to; returns the bytes."""
    total = 0
    for folder in folders:
        state, _ = status.read_state(folder)
        paths = list_superfluous_files(folder, named) if state == "FINISHED" or (named and state in status.OVER) else []
        if not paths:
            continue
        own = sum(map(measure_size, paths))
        total += own
        words = ", ".join(str(path.relative_to(folder.path)) for path in paths)
        print(f"{folder.path.name}  {own / 1e6:.1f} MB  {words}")
        for path in paths if delete else ():
            remove_path(path)
    return total


def parse_delete(delete: str, dry_run: str) -> bool:
    """Read whether to delete. DRY_RUN=0, which older versions had for that, is accepted. Raises UserError."""
    is_dry = parse_switch("DRY_RUN", dry_run)
    if parse_switch("DELETE", delete):
        if is_dry:
            raise UserError("DELETE=1 deletes, and DRY_RUN=1 only shows; leave one of them out")
        return True
    if dry_run == "0" and not delete:
        print("note: DRY_RUN=0 is now DELETE=1", file=sys.stderr)
        return True
    return False


def main(given: argparse.Namespace) -> int:
    """Show or delete what runs no longer need; returns the exit status."""
    delete = parse_delete(given.delete, given.dry_run)
    asked = Choice(given.runs, given.name, given.last, given.where)
    folders = selection.select_runs(asked, Path(given.runs_folder or "runs"), newest=0)
    total = remove_superfluous_files(folders, bool(given.runs), delete)
    print(f"{total / 1e6:.1f} MB " + ("freed" if delete else "would be freed; make prune-runs DELETE=1 deletes it"))
    return 0
