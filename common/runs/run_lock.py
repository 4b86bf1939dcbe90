"""Lock that allows only one process at a time on this machine to start, submit or control an attempt of a run.

This module does not import torch.
"""

from __future__ import annotations

import fcntl
import time
from typing import IO

from common.runs import claims
from common.runs.folder import RunFolder
from common.system.errors import RunTakenError

LOCK_SECONDS = 1.0  # maximum time to wait until the ranks of a killed process have exited
POLL_SECONDS = 0.05


def lock_run(folder: RunFolder) -> IO[str]:
    """Prevent other processes on this machine from starting an attempt of a run.

    If an attempt is stopping, this function first waits until that attempt has ended. Returns the open file that holds
    the lock. Raises RunTakenError if another process holds the lock. This lock is not used on a cluster, because an old
    attempt on a disconnected host could hold the lock forever.
    """
    claims.wait_for_earlier_attempt(folder)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        file = try_to_lock(folder)
        if file is not None:
            return file
        if time.monotonic() > deadline:
            problem = f"{folder.path.name} is already running or being started on this machine"
            raise RunTakenError(f"{problem}; {claims.format_live_attempt_remedy(folder)}")
        time.sleep(POLL_SECONDS)


def try_to_lock(folder: RunFolder) -> IO[str] | None:
    """Lock a run for this process and its ranks.

    Returns the locked file, or None if another process holds the lock. On a disk that does not support locks, the file
    is returned without a lock.
    """
    file = open(folder.path / "config.yaml")  # noqa: SIM115 (closing the file releases the lock)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    except OSError:
        pass
    return file
