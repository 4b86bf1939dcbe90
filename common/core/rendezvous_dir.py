"""Private temporary folders in which forked ranks meet, and their removal where a launcher was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

UNLOCKED_SECONDS = 60.0  # in which a new folder may not have its lock yet


def create_rendezvous_dir() -> tuple[Path, int]:
    """Make a private folder for the rendezvous; return it and its lock, which this process and its ranks hold.

    Folders whose lock nobody holds are deleted: a launcher that was killed left them.
    """
    for path in Path(tempfile.gettempdir()).glob("rendezvous-*-*"):
        with contextlib.suppress(OSError):  # locked, somebody else's, or gone
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = os.fstat(handle)
                if found.st_uid == os.getuid() and time.time() - found.st_mtime > UNLOCKED_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)
    private = Path(tempfile.mkdtemp(prefix=f"rendezvous-{os.getpid()}-"))
    lock = os.open(private, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a network disk may know no locks; then nothing is ever swept
        fcntl.flock(lock, fcntl.LOCK_EX)
    return private, lock
