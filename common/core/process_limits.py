"""Limits on the number of threads and processes: found in errors, and named with their remedy. Imports no torch."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from common.core.text import read_or_empty

SHORTAGE = re.compile(
    "can't start new thread|unable to start .*thread|thread creation failed|pthread_create failed"
    "|resource temporarily unavailable",
    re.IGNORECASE,
)  # in the words of Python, the system, libgomp and OpenBLAS
LAST_WORDS = re.compile(f"{SHORTAGE.pattern}|terminate called without an active exception", re.IGNORECASE)
"""In the log of a process that was aborted: the last ones are of gloo where it can start some of its threads only."""


def describe_shortage() -> str:
    """Describe that no more threads or processes can be started, with the limit and the remedy."""
    return (
        f"no more threads or processes can be started: {describe_limit()}; raise that limit, or lower "
        "launch.threads, data.workers or the number of ranks"
    )


def is_shortage(error: BaseException) -> bool:
    """Check for an error that says that no thread or process could be started."""
    return isinstance(error, RuntimeError | OSError) and bool(SHORTAGE.search(str(error)))


def explain_last_words(log: str) -> str:
    """Return why a process ended whose log this is, where it tells of a shortage; else an empty text."""
    return describe_shortage() if LAST_WORDS.search(log) else ""


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
