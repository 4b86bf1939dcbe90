"""Linux processes: end with the parent, adopt and kill orphans, tell a process from a later one with its pid."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
from pathlib import Path
from typing import NamedTuple, NoReturn

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


def count_host_cores() -> int:
    """Return the cores of this host that its ranks may use.

    Under SLURM a rank may be bound to its own cores, and sees fewer than the job has on this host.
    """
    return max(len(os.sched_getaffinity(0)), int(os.environ.get("SLURM_CPUS_ON_NODE") or 0))


def kill_children() -> None:
    """Kill this process's children, and with `adopt_orphans` theirs, until none is left."""
    while pids := list_children():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # somebody else may have waited for it
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def exit_at_once(status: str | int | None) -> NoReturn:
    """End this process as a forked rank ends: a library's thread that still runs would abort an ordinary exit."""
    with contextlib.suppress(Exception):  # a full disk, or a closed pipe
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1 if status else 0)


class Process(NamedTuple):
    """A process, distinguished from a later one with the same pid by its start time."""

    pid: int
    start: int
    """Clock ticks from boot to its start."""

    @staticmethod
    def identify(pid: int) -> Process:
        """Return the running process with a pid. Raises OSError."""
        return Process(pid, int(read_process_stat(pid)[19]))

    @staticmethod
    def load(path: Path) -> Process | None:
        """Return the process recorded in a file; None if it has ended or the file cannot be read."""
        try:
            pid, start = path.read_text().split()
        except (OSError, ValueError):
            return None
        process = Process(int(pid), int(start))
        return process if process.is_alive() else None

    def save(self, path: Path) -> None:
        """Record the process in a file. Raises OSError."""
        path.with_suffix(".new").write_text(f"{self.pid} {self.start}\n")
        path.with_suffix(".new").replace(path)

    def is_alive(self) -> bool:
        """Check whether this very process runs."""
        try:
            now = read_process_stat(self.pid)
        except OSError:
            return False
        return int(now[19]) == self.start and now[0] not in "ZX"

    def kill(self) -> None:
        """Kill this very process and wait up to 30 s for its end; with a table's first process all in it end."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        if self.is_alive():  # asked after opening: the handle now means the recorded process or none
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [], 30)
        os.close(handle)


def read_process_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, process group and so on. Raises OSError."""
    name = "self" if pid == os.getpid() else pid  # /proc may be that of another pid namespace
    return Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
