"""Measurement of the CPU time that other processes use while a run measures times.

Other processes on the same host make the measured times longer. CPU times are read from /proc/stat on Linux, and
include the time that a hypervisor gives to other virtual machines.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.ranks.rendezvous import World
from common.runs.provenance import read_boot_id
from common.runs.result import ReportData
from common.system.text import read_text_or_empty

NOTED_SHARE = 0.1
"""Minimum fraction of the CPU time used by other processes for which the final table contains a note."""
CPU_LINE = re.compile(r"^cpu(\d+) (\d+) (\d+) (\d+) \d+ \d+ (\d+) (\d+) (\d+)", re.MULTILINE)
"""Pattern of the line of one CPU in /proc/stat, see proc_stat(5). Idle time and I/O wait time are not captured."""


@dataclass(frozen=True)
class CpuUse:
    """CPU time used during an interval, as measured by one rank."""

    machine: str
    """Unique id of the machine. One machine may have several host names."""
    host: str
    elapsed: float
    """Length of the interval in seconds."""
    busy: Mapping[str, float]
    """Busy time in seconds of each CPU that the rank may use, by CPU number."""
    rank_seconds: float
    """CPU time in seconds that the process of the rank has used."""


class ForeignLoadMeter:
    """A meter of the CPU time that other processes use on all hosts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.start = time.perf_counter()
        self.rank_start = time.process_time()
        self.busy_start = read_busy_seconds()

    def measure_cpu_use(self) -> CpuUse:
        """Return the CPU time that this rank has measured since the meter was created."""
        now = read_busy_seconds()
        cpus = self.busy_start.keys() & now.keys()
        busy = {cpu: now[cpu] - self.busy_start[cpu] for cpu in cpus}
        elapsed = time.perf_counter() - self.start
        rank_seconds = time.process_time() - self.rank_start
        return CpuUse(read_boot_id(), socket.gethostname(), elapsed, busy, rank_seconds)

    def report_foreign_load(self) -> ReportData:
        """Report the largest fraction of a host's CPU time that other processes have used.

        All ranks must call this method.
        """
        gathered = self.world.gather(vars(self.measure_cpu_use()))
        return report_foreign_shares(compute_foreign_shares([CpuUse(**use) for use in gathered]))


def read_busy_seconds() -> dict[str, float]:
    """Return the busy time in seconds of each CPU that this process may use.

    Busy time is counted since the start of the machine. The dict is empty if the busy times are unknown.
    """
    allowed = os.sched_getaffinity(0)
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    seconds: dict[str, float] = {}
    for cpu, *ticks in CPU_LINE.findall(read_text_or_empty("/proc/stat")):
        if int(cpu) in allowed:
            seconds[cpu] = sum(map(int, ticks)) / ticks_per_second
    return seconds


def compute_foreign_shares(uses: Sequence[CpuUse]) -> dict[str, float]:
    """Return the fraction of the CPU time that other processes used on each machine.

    `uses` contains the measurements of all ranks. Each key of the returned dict consists of the host names of a
    machine, separated by commas.
    """
    machines: dict[str, list[CpuUse]] = {}
    for use in uses:
        machines.setdefault(use.machine, []).append(use)

    shares: dict[str, float] = {}
    for machine_uses in machines.values():
        busy: dict[str, float] = {}  # each CPU is counted once, even if several ranks may use the CPU
        for use in machine_uses:
            busy |= use.busy
        foreign = sum(busy.values()) - sum(use.rank_seconds for use in machine_uses)
        available = len(busy) * max(use.elapsed for use in machine_uses)
        hosts = ", ".join(sorted({use.host for use in machine_uses}))
        if available:
            shares[hosts] = min(1.0, max(0.0, foreign / available))
    return shares


def report_foreign_shares(shares: Mapping[str, float]) -> ReportData:
    """Create a report of the CPU time that other processes used.

    `shares` contains the fraction of the CPU time that other processes used, by host name. The largest fraction is
    stored in result.json. The final table contains a note for each fraction of at least NOTED_SHARE.
    """
    notes = [
        f"other processes used {share:.0%} of the CPU time on {hosts}; measured times are longer than on an idle host"
        for hosts, share in shares.items()
        if share >= NOTED_SHARE
    ]
    rows = {"other load": "\n".join(notes)} if notes else {}
    measured: dict[str, Any] = {"foreign_cpu_share": max(shares.values())} if shares else {}
    return ReportData(rows, measured=measured)
