"""Create private temporary folders for the rendezvous of forked ranks, and delete abandoned folders."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

MIN_AGE_SECONDS = 60.0  # a newer folder may not have been locked yet


def create_rendezvous_dir() -> tuple[Path, int]:
    """Create a private folder for the rendezvous. Return the folder and the file descriptor of its lock.

    This process and its ranks hold the lock. Folders that killed launchers have left behind are unlocked and are
    deleted by this function.
    """
    for path in Path(tempfile.gettempdir()).glob("rendezvous-*-*"):
        with contextlib.suppress(OSError):  # the folder is locked, owned by another user, or already deleted
            delete_abandoned_folder(path)
    folder = Path(tempfile.mkdtemp(prefix=f"rendezvous-{os.getpid()}-"))
    lock = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # without lock support, as on some network disks, abandoned folders remain
        fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def delete_abandoned_folder(folder: Path) -> None:
    """Delete a folder of this user if it is old and no process has locked it. Raises OSError if it is locked."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        stat = os.fstat(handle)
        is_old = time.time() - stat.st_mtime > MIN_AGE_SECONDS
        if stat.st_uid == os.getuid() and is_old:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)
