"""Functions for Linux processes: exit with the parent, adopt and kill orphans, and detect reused pids."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
from pathlib import Path
from typing import NamedTuple, NoReturn

from common.system.exit_status import get_exit_status

PR_SET_PDEATHSIG = 1  # from linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36


def kill_with_parent() -> None:
    """Make the kernel kill this process when its parent exits for any reason."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of each of its descendants whose parent exits."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def list_children() -> list[int]:
    """Return the pids of the child processes that any thread of this process has started."""
    pids: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread may have exited
            pids += map(int, (task / "children").read_text().split())
    return pids


def count_host_cores() -> int:
    """Return the number of cores that all ranks on this host may use together.

    Under SLURM, a rank may be bound to only some of the cores that the job has on this host.
    """
    return max(len(os.sched_getaffinity(0)), int(os.environ.get("SLURM_CPUS_ON_NODE") or 0))


def kill_children() -> None:
    """Kill the children of this process. If `adopt_orphans` was called before, kill all descendants."""
    while pids := list_children():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # another thread may have reaped the child
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def exit_without_cleanup(status: str | int | None) -> NoReturn:
    """Exit immediately without cleanup. Library threads that are still running could abort a normal exit."""
    with contextlib.suppress(Exception):  # the disk may be full or the pipe closed
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(get_exit_status(status))


class Process(NamedTuple):
    """A process, identified by its pid and start time because pids are reused."""

    pid: int
    start: int
    """Start time of the process, in clock ticks since boot."""

    @staticmethod
    def identify(pid: int) -> Process:
        """Return the running process with this pid. Raises OSError if there is no such process."""
        return Process(pid, int(read_process_stat(pid)[19]))

    @staticmethod
    def load(path: Path) -> Process | None:
        """Load a process from a file. Return None if the process has exited or the file cannot be read."""
        try:
            pid, start = map(int, path.read_text().split())
        except (OSError, ValueError):
            return None
        process = Process(pid, start)
        return process if process.is_alive() else None

    def save(self, path: Path) -> None:
        """Write the pid and start time to a file. Raises OSError if writing fails."""
        path.with_suffix(".new").write_text(f"{self.pid} {self.start}\n")
        path.with_suffix(".new").replace(path)

    def is_alive(self) -> bool:
        """Return whether this process is running, and not another process with the same pid."""
        try:
            stat = read_process_stat(self.pid)
        except OSError:
            return False
        return int(stat[19]) == self.start and stat[0] not in "ZX"

    def kill(self) -> None:
        """Kill the process and wait up to 30 s for its exit.

        Killing the init process of a pid namespace also kills all other processes in the namespace.
        """
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        if self.is_alive():  # checked after opening, so that the handle cannot refer to a later process
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [], 30)
        os.close(handle)


def read_process_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the process name: state, parent, process group, and so on.

    Raises OSError if the process does not exist.
    """
    name = "self" if pid == os.getpid() else pid  # /proc may belong to another pid namespace
    return Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
