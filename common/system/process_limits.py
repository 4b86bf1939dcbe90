"""Detect and describe errors caused by limits on threads and processes. This module does not import torch."""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

from common.system.text import read_text_or_empty

# matches messages of Python, the operating system, libgomp and OpenBLAS
SHORTAGE_PATTERN = re.compile(
    "can't start new thread|unable to start .*thread|thread creation failed|pthread_create failed"
    r"|\bfork\b.*resource temporarily unavailable",
    re.IGNORECASE,
)
# matches the same messages and two messages of std::thread, which gloo uses, in the log of an aborted process
ABORT_MESSAGES = re.compile(
    f"{SHORTAGE_PATTERN.pattern}|terminate called without an active exception"
    r"|std::system_error'\s+what\(\):\s+resource temporarily unavailable",
    re.IGNORECASE,
)
FORK_FUNCTIONS = {"fork", "fork_exec", "_fork_exec"}  # functions of os and subprocess that fork


def describe_thread_shortage() -> str:
    """Describe a shortage of threads or processes, with the limit and a remedy."""
    return (
        f"no more threads or processes can be started: {describe_tightest_limit()}; raise that limit, or lower "
        "launch.threads, data.workers or the number of ranks"
    )


def is_thread_shortage(error: BaseException) -> bool:
    """Return whether an error occurred because a thread or process could not be started."""
    if isinstance(error, BlockingIOError) and is_failed_fork(error):
        return True
    return isinstance(error, RuntimeError | OSError) and bool(SHORTAGE_PATTERN.search(str(error)))


def is_failed_fork(error: BlockingIOError) -> bool:
    """Return whether a function that forks raised the error. Sockets and locks raise the same error type."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return not FORK_FUNCTIONS.isdisjoint(trace.tb_frame.f_code.co_names)


def explain_exit_from_log(log: str, exit_code: int) -> str:
    """Explain the exit of a process if its log reports a shortage of threads or processes.

    Returns an empty string if the log reports no shortage. `exit_code` is negative if a signal ended the process.
    Libraries that cannot start a thread abort the process (SIGABRT) or let the process exit. If any other signal ended
    the process, the log does not contain the cause.
    """
    if exit_code == -signal.SIGABRT:
        return describe_thread_shortage() if ABORT_MESSAGES.search(log) else ""
    return describe_thread_shortage() if exit_code > 0 and SHORTAGE_PATTERN.search(log) else ""


def describe_tightest_limit() -> str:
    """Describe the limit on threads and processes that is closest to being reached."""
    limits = list(list_process_limits_of_control_groups())
    user_limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.getuid() and user_limit != resource.RLIM_INFINITY:  # this limit does not apply to root
        limits.append((user_limit - count_threads_of_user(), f"ulimit -u is {user_limit}"))
    if limits:
        return min(limits)[1]
    kernel_limit = read_text_or_empty("/proc/sys/kernel/threads-max").strip()
    return f"kernel.threads-max is {kernel_limit}"


def list_process_limits_of_control_groups() -> Iterator[tuple[int, str]]:
    """Yield the number of processes that each control group can still start, with a description of the limit."""
    for name, folder in list_control_groups("pids"):
        limit = read_text_or_empty(f"{folder}/pids.max").strip()
        current = read_text_or_empty(f"{folder}/pids.current").strip()
        if limit.isdecimal() and current.isdecimal():
            yield int(limit) - int(current), f"pids.max of control group {name} is {limit}"


def list_control_groups(controller: str) -> Iterator[tuple[str, Path]]:
    """Yield the names and folders of the control groups (versions 1 and 2) of this process and their parents."""
    for line in read_text_or_empty("/proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        group = Path("/sys/fs/cgroup") / controllers / name.lstrip("/")
        for folder in [group, *group.parents]:
            yield name, folder


def count_threads_of_user() -> int:
    """Count the threads of all processes of this user."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == os.getuid():
                count += sum(1 for _ in (process / "task").iterdir())
        except OSError:  # the process has exited
            continue
    return count
