"""Lock of a run: one process of this machine starts, submits or controls an attempt at a time. Imports no torch."""

from __future__ import annotations

import fcntl
import time
from typing import IO

from common.core.errors import RunTakenError
from common.runs import claims
from common.runs.folder import RunFolder

LOCK_SECONDS = 1.0  # until the ranks of a killed process have ended
POLL_SECONDS = 0.05


def lock_run(folder: RunFolder) -> IO[str]:
    """Keep other processes of this machine from starting an attempt of a run.

    Returns the file that holds the lock.

    Waits for an attempt that is stopping. Raises RunTakenError if another process holds the lock. Not used on a
    cluster: an old attempt behind a broken network could hold the lock forever.
    """
    claims.wait_for_earlier_attempt(folder)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        file = try_to_lock(folder)
        if file is not None:
            return file
        if time.monotonic() > deadline:
            problem = f"{folder.path.name} is already running or being started on this machine"
            raise RunTakenError(f"{problem}; {claims.format_remedy(folder)}")
        time.sleep(POLL_SECONDS)


def try_to_lock(folder: RunFolder) -> IO[str] | None:
    """Lock a run for this process and its ranks.

    Returns None if another process holds the lock.

    On a disk without locks the file is returned unlocked.
    """
    file = open(folder.path / "config.yaml")  # noqa: SIM115 (closing it releases the lock)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:
        pass
    return file
