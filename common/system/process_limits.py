"""Description of the limits on threads, processes and open files. This module does not import torch."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from common.system.text import read_text_or_empty


def describe_thread_shortage() -> str:
    """Describe a shortage of threads or processes, with the limit and a remedy."""
    return (
        f"no more threads or processes can be started: {describe_tightest_limit()}; raise that limit, or lower "
        "launch.threads, data.workers or the number of ranks"
    )


def get_open_file_limit() -> int:
    """Return the number of files and connections that this process can have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def describe_file_shortage() -> str:
    """Describe a shortage of open files, with the limit and a remedy."""
    return (
        f"no more files or connections can be opened: ulimit -n is {get_open_file_limit()}; raise that limit, or lower "
        "data.workers or the number of ranks"
    )


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
