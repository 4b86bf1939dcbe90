"""CPU time that processes other than the ranks use during a measurement, which makes its times longer.

Linux counts the time of each CPU in /proc/stat. Time that a hypervisor gives to other machines counts, too.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.core.text import read_or_empty
from common.distributed.rendezvous import World
from common.runs.provenance import read_boot_id
from common.runs.result import Facts

NOTED_SHARE = 0.1  # of the CPUs, from which on the table has a note
CPU_LINE = re.compile(r"^cpu(\d+) (\d+) (\d+) (\d+) \d+ \d+ (\d+) (\d+) (\d+)", re.MULTILINE)  # proc_stat(5)


@dataclass(frozen=True)
class CpuUse:
    """CPU time that was used in an interval, as one rank has seen it. All times are in seconds."""

    machine: str
    """What identifies the machine, whatever host names it has."""
    host: str
    elapsed: float
    busy: Mapping[str, float]
    """Time that each CPU of the rank was busy, by the number of the CPU."""
    own: float
    """Time that the rank itself used."""


class ForeignLoadMeter:
    """Meter of the CPU time that other processes use on the hosts of the ranks, from now on."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.began, self.own, self.busy = time.perf_counter(), time.process_time(), read_busy_seconds()

    def measure(self) -> CpuUse:
        """Return what was used since the meter was made, as this rank sees it."""
        now = read_busy_seconds()
        busy = {cpu: now[cpu] - seconds for cpu, seconds in self.busy.items() if cpu in now}
        elapsed, own = time.perf_counter() - self.began, time.process_time() - self.own
        return CpuUse(read_boot_id(), socket.gethostname(), elapsed, busy, own)

    def report(self) -> Facts:
        """Return the largest share of a host's CPUs that others used, with a note where it is large.

        All ranks call it.
        """
        found = self.world.gather(vars(self.measure()))
        return report_shares(compute_foreign_shares([CpuUse(**use) for use in found]))


def read_busy_seconds() -> dict[str, float]:
    """Return the seconds that each CPU on which this process may run has been busy; empty where that is not known."""
    allowed, tick = os.sched_getaffinity(0), os.sysconf("SC_CLK_TCK")
    counted = {cpu: sum(map(int, ticks)) for cpu, *ticks in CPU_LINE.findall(read_or_empty("/proc/stat"))}
    return {cpu: ticks / tick for cpu, ticks in counted.items() if int(cpu) in allowed}


def compute_foreign_shares(uses: Sequence[CpuUse]) -> dict[str, float]:
    """Return the share of CPU time that others than these ranks used, by the host names of each machine."""
    machines: dict[str, list[CpuUse]] = {}
    for use in uses:
        machines.setdefault(use.machine, []).append(use)
    shares = {}
    for own in machines.values():
        busy: dict[str, float] = {}
        for use in own:
            busy |= use.busy
        foreign = sum(busy.values()) - sum(use.own for use in own)
        available = len(busy) * max(use.elapsed for use in own)
        hosts = ", ".join(sorted({use.host for use in own}))
        if available:
            shares[hosts] = min(1.0, max(0.0, foreign / available))
    return shares


def report_shares(shares: Mapping[str, float]) -> Facts:
    """Return the largest share for result.json, and a row of the table for hosts where it is large."""
    notes = [
        f"other processes used {share:.0%} of the CPUs of {hosts} meanwhile: times are longer than on a quiet host"
        for hosts, share in shares.items()
        if share >= NOTED_SHARE
    ]
    measured: dict[str, Any] = {"foreign_cpu_share": max(shares.values())} if shares else {}
    return Facts({"other load": "\n".join(notes)} if notes else {}, measured=measured)
