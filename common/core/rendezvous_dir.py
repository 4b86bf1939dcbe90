"""Private temporary folders for the rendezvous of forked ranks, and removal of abandoned ones."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

MIN_AGE_SECONDS = 60.0  # a newer folder may not be locked yet


def create_rendezvous_dir() -> tuple[Path, int]:
    """Create a private folder for the rendezvous; return it and its lock, which this process and its ranks hold.

    Also deletes unlocked folders, which launchers that were killed have left behind.
    """
    for path in Path(tempfile.gettempdir()).glob("rendezvous-*-*"):
        with contextlib.suppress(OSError):  # locked, owned by another user, or deleted
            delete_abandoned(path)
    folder = Path(tempfile.mkdtemp(prefix=f"rendezvous-{os.getpid()}-"))
    lock = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a network disk may not support locks; abandoned folders then remain
        fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def delete_abandoned(folder: Path) -> None:
    """Delete a folder of this user that no process has locked. Raises OSError if it is locked."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        stat = os.fstat(handle)
        is_old = time.time() - stat.st_mtime > MIN_AGE_SECONDS
        if stat.st_uid == os.getuid() and is_old:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)
