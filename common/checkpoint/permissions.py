"""Permissions of the current user for the checkpoints of a run."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from common.checkpoint import storage
from common.runs.folder import RunFolder


def list_unreadable_dirs(folder: RunFolder) -> list[Path]:
    """Return the folders whose checkpoints cannot be listed, because the current user has no permission."""
    unreadable: list[Path] = []
    for attempt, _ in folder.trace_attempts():
        path = storage.get_checkpoints_dir(attempt)
        try:
            os.scandir(path).close()
        except PermissionError:
            unreadable.append(path)
        except OSError:  # this attempt has not saved any checkpoint
            continue
    return unreadable


def format_permission_remedy(folder: RunFolder) -> str:
    """Return a clause that explains how the current user gets permission to read the checkpoints of a run."""
    checkpoints = f"{folder.path}/attempts/*/checkpoints"
    owners = set()
    for pattern in ("attempts/*/checkpoints", "attempts/*/checkpoints/**/*"):
        for path in folder.path.glob(pattern):
            with contextlib.suppress(OSError):  # this user may not enter the folder of this path
                owners.add(path.lstat().st_uid)
    foreign_owners = owners - {os.geteuid(), 0}
    if foreign_owners:
        return (
            f"the files belong to user ID {min(foreign_owners)}: resume the run as that user, or let root run "
            f"chown -R {os.geteuid()} {folder.path}, then resume the run"
        )
    return f"permission was denied: run chmod -R u+rwX {checkpoints}, then resume the run"
