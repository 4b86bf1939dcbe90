"""Limits on the number of threads and processes: found in errors, and named with their remedy. Imports no torch."""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

from common.core.text import read_or_empty

SHORTAGE = re.compile(
    "can't start new thread|unable to start .*thread|thread creation failed|pthread_create failed"
    r"|\bfork\b.*resource temporarily unavailable",
    re.IGNORECASE,
)  # in the words of Python, the system, libgomp and OpenBLAS
LAST_WORDS = re.compile(
    f"{SHORTAGE.pattern}|terminate called without an active exception"
    r"|std::system_error'\s+what\(\):\s+resource temporarily unavailable",
    re.IGNORECASE,
)
"""In the log of an aborted process. The last two are of std::thread, which gloo uses."""
FORKS = {"fork", "fork_exec", "_fork_exec"}
"""Names of the functions that fork, in os and subprocess."""


def describe_shortage() -> str:
    """Describe that no more threads or processes can be started, with the limit and the remedy."""
    return (
        f"no more threads or processes can be started: {describe_limit()}; raise that limit, or lower "
        "launch.threads, data.workers or the number of ranks"
    )


def is_shortage(error: BaseException) -> bool:
    """Check for an error that says that no thread or process could be started."""
    if isinstance(error, BlockingIOError) and is_failed_fork(error):
        return True
    return isinstance(error, RuntimeError | OSError) and bool(SHORTAGE.search(str(error)))


def is_failed_fork(error: BlockingIOError) -> bool:
    """Check whether an error was raised by a function that forks: sockets and locks raise the same one."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return not FORKS.isdisjoint(trace.tb_frame.f_code.co_names)


def explain_last_words(log: str, exit_code: int) -> str:
    """Return why a process ended, where its log reports a shortage; else an empty text.

    `exit_code` is negative for a signal. Libraries that cannot start a thread abort the process or let it exit; after
    any other signal the log does not say why the process ended.
    """
    if exit_code == -signal.SIGABRT:
        return describe_shortage() if LAST_WORDS.search(log) else ""
    return describe_shortage() if exit_code > 0 and SHORTAGE.search(log) else ""


def describe_limit() -> str:
    """Name the limit on threads and processes of which the least is left."""
    limits = [*list_group_limits()]
    allowed = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.getuid() and allowed != resource.RLIM_INFINITY:  # it does not bind root
        limits.append((allowed - count_threads_of_user(), f"ulimit -u is {allowed}"))
    highest = read_or_empty("/proc/sys/kernel/threads-max").strip()
    return min(limits)[1] if limits else f"kernel.threads-max is {highest}"


def list_group_limits() -> Iterator[tuple[int, str]]:
    """Yield what is left to this process in each control group, version 1 and 2, with the name of the limit."""
    for line in read_or_empty("/proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "pids" not in controllers.split(","):
            continue
        base = Path("/sys/fs/cgroup") / controllers
        for folder in [base / name.lstrip("/"), *(base / name.lstrip("/")).parents]:
            allowed, used = (read_or_empty(str(folder / file)).strip() for file in ("pids.max", "pids.current"))
            if allowed.isdecimal() and used.isdecimal():
                yield int(allowed) - int(used), f"pids.max of control group {name} is {allowed}"


def count_threads_of_user() -> int:
    """Count the threads of all processes of this user."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == os.getuid():
                count += sum(1 for _ in (process / "task").iterdir())
        except OSError:  # it has ended meanwhile
            continue
    return count
