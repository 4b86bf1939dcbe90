"""Linux processes: end with the parent, adopt and kill orphans, tell a process from a later one with its pid."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

PDEATHSIG, SUBREAPER = 1, 36  # PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of linux/prctl.h


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1)


def list_children() -> list[int]:
    """Return the pids of the processes that any thread of this one started."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread may end meanwhile
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


def kill_children() -> None:
    """Kill this process's children, and with `adopt_orphans` theirs, until none is left."""
    while pids := list_children():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # somebody else may have waited for it
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def read_stat(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, process group and so on. Raises OSError."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def read_start_ticks(pid: int | str) -> int:
    """Return when a process started, in clock ticks since boot; with the pid it names one process. Raises OSError."""
    return int(read_stat(pid)[19])
