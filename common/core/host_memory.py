"""Memory limits of this host, compared with what a model needs before anything starts. Imports no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from common.core.errors import UserError
from common.core.text import format_count, read_or_empty
from configs.shared import Experiment

UNLIMITED = 1 << 60  # cgroups write numbers near 2**63 for no limit
FILE_CACHE = re.compile(r"^(?:total_)?inactive_file (\d+)$", re.MULTILINE)  # the kernel gives it back when asked
OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def check_host_memory(settings: Experiment) -> None:
    """Raise UserError where parameters, gradients and optimizer state of this host's ranks exceed its free memory."""
    needed = settings.memory_bytes
    free, what = measure_available_memory()
    if needed > free:
        ranks = format_count(settings.processes // settings.launch.nodes, "rank")
        raise UserError(
            f"the model needs {needed / 1e9:,.1f} GB on a host for the parameters, gradients and optimizer of {ranks}, "
            f"and {free / 1e9:,.1f} GB are free ({what}); choose a smaller model or fewer ranks"
        )


def measure_available_memory() -> tuple[int, str]:
    """Return the bytes that a process started here can get, and the name of what limits them."""
    limits = [
        (read_free_memory(), "the host's memory"),
        (read_slurm_limit(), "what SLURM gave the job"),
        *read_cgroup_limits(),
    ]
    return min((bytes, what) for bytes, what in limits if bytes is not None)


def read_free_memory() -> int:
    """Return the bytes of memory that are free on this host."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) * 1024 if found else UNLIMITED


def read_slurm_limit() -> int | None:
    """Return the memory of a SLURM job on each host, in bytes; None outside a job or without a limit."""
    whole, each, cores = (
        os.environ.get(f"SLURM_{name}", "") for name in ("MEM_PER_NODE", "MEM_PER_CPU", "CPUS_ON_NODE")
    )
    if whole.isdecimal() and int(whole):
        return int(whole) * 2**20
    return int(each) * int(cores) * 2**20 if each.isdecimal() and cores.isdecimal() and int(each) else None


def read_cgroup_limits() -> list[tuple[int, str]]:
    """Return the bytes left in each control group of this process, version 1 and 2, with its name in words."""
    found = []
    for line in read_or_empty("/proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base = Path("/sys/fs/cgroup") / controllers
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        for folder in [base / name.lstrip("/"), *(base / name.lstrip("/")).parents]:
            limit, used = (read_or_empty(str(folder / file)).strip() for file in names)
            if limit.isdecimal() and used.isdecimal() and int(limit) < UNLIMITED:
                cached = map(int, FILE_CACHE.findall(read_or_empty(str(folder / "memory.stat"))))
                held = int(used) - max(cached, default=0)
                found.append((max(0, int(limit) - held), f"the limit of control group {name}"))
    return found


def count_oom_kills() -> int:
    """Return how many processes this machine's kernel has killed for lack of memory since it booted."""
    found = OOM_KILLS.search(read_or_empty("/proc/vmstat"))
    return int(found[1]) if found else 0
