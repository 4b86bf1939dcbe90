"""Linux processes: exit with the parent, adopt and kill orphans, distinguish processes with the same pid."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
from pathlib import Path
from typing import NamedTuple, NoReturn

PR_SET_PDEATHSIG = 1  # from linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36


def kill_with_parent() -> None:
    """Let the kernel kill this process when its parent exits for any reason."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parent exits."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def list_children() -> list[int]:
    """Return the pids of the children that any thread of this process started."""
    pids: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread may have exited
            pids += map(int, (task / "children").read_text().split())
    return pids


def count_host_cores() -> int:
    """Return the number of cores of this host that its ranks may use together.

    Under SLURM a rank may be bound to a part of the cores that the job has on this host.
    """
    return max(len(os.sched_getaffinity(0)), int(os.environ.get("SLURM_CPUS_ON_NODE") or 0))


def kill_children() -> None:
    """Kill the children of this process, and after `adopt_orphans` all descendants."""
    while pids := list_children():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # another thread may have waited for it
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def exit_at_once(status: str | int | None) -> NoReturn:
    """Exit without cleanup: threads of libraries that still run would abort an ordinary exit."""
    with contextlib.suppress(Exception):  # a full disk or a closed pipe
        sys.stdout.flush()
        sys.stderr.flush()
    if not isinstance(status, int):
        status = 1 if status else 0
    os._exit(status)


class Process(NamedTuple):
    """A process, identified by its pid and start time because pids are reused."""

    pid: int
    start: int
    """Clock ticks since boot."""

    @staticmethod
    def identify(pid: int) -> Process:
        """Return the running process with a pid. Raises OSError."""
        return Process(pid, int(read_process_stat(pid)[19]))

    @staticmethod
    def load(path: Path) -> Process | None:
        """Load a process from a file; None if it has exited or the file cannot be read."""
        try:
            pid, start = map(int, path.read_text().split())
        except (OSError, ValueError):
            return None
        process = Process(pid, start)
        return process if process.is_alive() else None

    def save(self, path: Path) -> None:
        """Write the process to a file. Raises OSError."""
        path.with_suffix(".new").write_text(f"{self.pid} {self.start}\n")
        path.with_suffix(".new").replace(path)

    def is_alive(self) -> bool:
        """Check whether this process is running, not another one with its pid."""
        try:
            stat = read_process_stat(self.pid)
        except OSError:
            return False
        return int(stat[19]) == self.start and stat[0] not in "ZX"

    def kill(self) -> None:
        """Kill the process and wait up to 30 s; the init process of a pid namespace takes all its processes with it."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        if self.is_alive():  # checked after opening, so the handle cannot refer to a later process
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [], 30)
        os.close(handle)


def read_process_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: state, parent, process group, ... Raises OSError."""
    name = "self" if pid == os.getpid() else pid  # /proc may belong to another pid namespace
    return Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
