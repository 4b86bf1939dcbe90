"""Lock of a run: one process of this machine starts, submits or conducts an attempt at a time. Imports no torch."""

from __future__ import annotations

import fcntl
import time
from typing import IO

from common.core.errors import RunTaken
from common.runs import claims
from common.runs.folder import Folder

LOCK_SECONDS = 1.0  # for the ranks of a process that was killed to end


def lock_run(folder: Folder) -> IO[str]:
    """Keep other processes of this machine from starting an attempt of a run; return the file that holds the lock.

    Waits for an attempt that was told to stop. Raises RunTaken if another process holds the lock. Not used on a
    cluster: an old attempt cut off by the network could hold the lock for ever.
    """
    claims.wait_for_earlier_attempt(folder)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        file = try_to_lock(folder)
        if file is not None:
            return file
        if time.monotonic() > deadline:
            problem = f"{folder.path.name} is already running or being started on this machine"
            raise RunTaken(f"{problem}; {claims.format_remedy(folder)}")
        time.sleep(0.05)


def try_to_lock(folder: Folder) -> IO[str] | None:
    """Lock a run for this process and its ranks; None where another process has it.

    Where a disk knows no locks the file is returned without one.
    """
    file = open(folder.path / "config.yaml")  # noqa: SIM115 (the lock ends with it)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:
        pass
    return file
