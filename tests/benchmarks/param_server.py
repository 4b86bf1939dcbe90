"""Gains and losses of asynchrony: four workers on one host, or on four of which one has a slow cable, beside DDP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from common.techniques.parameter_server.server import StalenessPolicy
from slurm.local_cluster.cables import Shape, parse_rate_and_delay
from tests.benchmarks import hosts
from tests.benchmarks.measure import Samples, Task, summarize_values
from tests.benchmarks.mnist_pipeline import no_mnist
from tests.benchmarks.param_server_bound import compute_bound
from tests.benchmarks.parts import Part, run_of
from tests.benchmarks.records import Cell, Row, Table

NAME = "param_server"
BRIEF = ("processes_per_node=4", "launch.threads=1", "steps=300", "data.test_limit=0")
KEEP = ("test_accuracy", "staleness_mean")
MODES = {
    "sync, 1 server": ("mode=sync",),
    "sync, 4 servers": ("mode=sync", "servers=4"),
    "async": ("mode=async",),
    "async, damped": ("mode=async", "damp=true"),
    **{f"bounded, {bound}": ("mode=bounded", f"staleness={bound}") for bound in (0, 1, 3, 9)},
}
RATE = "100mbit"
RATE_LABEL = RATE.replace("mbit", " Mbit/s")
DDP = "DDP"
FREE = "async, no slow link"
WITHOUT_SLOW = "async, without the slow worker"
# ranks meet to write metrics, and all wait there for the slow cable: seldom, as one would set it on such a cable
ON_HOSTS = ("model=mlp", "data.fallback=none", "launch.threads=1", "epochs=1", "data.test_limit=0", "log.seconds=10")
BATCH = 64
POLICIES: dict[str, tuple[Literal["sync", "async", "bounded"], int]] = {
    "sync": ("sync", 0),
    "async": ("async", 0),
    **{f"bounded, {bound}": ("bounded", bound) for bound in (0, 2, 8)},
}


# ---- one host


def sides(scratch: Path) -> list[Task]:
    tasks = [run_of(scratch, DDP, "ddp_multinode", *BRIEF, keep=("test_accuracy",))]
    for side, settings in MODES.items():
        tasks.append(run_of(scratch, side, NAME, *BRIEF, *settings, "plot=false", keep=KEEP))
    return tasks


def table(samples: Samples) -> Table:
    rows = []
    for side in samples.values:
        staleness: Cell = "" if side == DDP else samples.number(side, "staleness_mean")
        accuracy = samples.number(side, "test_accuracy", factor=100)
        rows.append(Row(side, [samples.number(side, factor=1e3), accuracy, staleness]))
    return Table(("mode", "ms per step", "test accuracy, %", "mean staleness"), rows)


# ---- four hosts, of which one has a slow cable


def sides_on_hosts(scratch: Path) -> list[Task]:
    slow = parse_rate_and_delay(RATE, "")
    shard = BATCH // hosts.HOSTS
    keep = (*KEEP, "pushes", "bytes_received")

    def serve(side: str, mode: str, staleness: int, cable: Shape, count: int = hosts.HOSTS) -> Task:
        bound = (f"staleness={staleness}",) if mode == "bounded" else ()
        settings = (*ON_HOSTS, f"batch={shard * count}", f"mode={mode}", *bound, "plot=false")
        return hosts.run_on_hosts(scratch, side, NAME, *settings, last=cable, count=count, keep=keep)

    ddp_settings = (*ON_HOSTS, f"batch={BATCH}")
    ddp = hosts.run_on_hosts(scratch, DDP, "ddp_multinode", *ddp_settings, last=slow, keep=("test_accuracy",))
    free = serve(FREE, "async", 0, Shape())
    without_slow = serve(WITHOUT_SLOW, "async", 0, Shape(), hosts.HOSTS - 1)
    servers = [serve(side, mode, staleness, slow) for side, (mode, staleness) in POLICIES.items()]
    return [free, without_slow, ddp, *servers]


def compute_bounds(samples: Samples, side: str) -> list[float]:
    """Return the highest possible samples/s, round by round."""
    mode, staleness = POLICIES[side]
    policy = StalenessPolicy(mode, staleness, hosts.HOSTS)
    shard = BATCH / hosts.HOSTS
    message_bytes = samples.list_counted(side, "bytes_received_0")[0] / samples.list_counted(side, "pushes_0")[0]
    cable = parse_rate_and_delay(RATE, "")
    carrying = 2 * 8 * max(0, message_bytes - cable.bucket) / cable.rate  # there and back
    processors = len(os.sched_getaffinity(0))

    bounds = []
    rates = samples.list_counted(FREE, "samples_per_second")
    rates_without_slow = samples.list_counted(WITHOUT_SLOW, "samples_per_second")
    for rate, rate_without_slow in zip(rates, rates_without_slow, strict=True):
        pushes = compute_bound(policy, rate / shard, rate_without_slow / shard, carrying, processors)
        bounds.append(shard * pushes)
    return bounds


def table_on_hosts(samples: Samples) -> Table:
    rows = []
    for side in samples.values:
        rates = samples.list_counted(side, "samples_per_second")
        accuracy = samples.number(side, "test_accuracy", factor=100)
        staleness: Cell = "" if side == DDP else samples.number(side, "staleness_mean")
        share: Cell = ""
        bound: Cell = ""
        if side in POLICIES:
            bounds = compute_bounds(samples, side)
            share = summarize_values([a / b for a, b in zip(rates, bounds, strict=True)])
            bound = summarize_values(bounds)
        cells = [share, summarize_values(rates), bound, accuracy, staleness]
        rows.append(Row(side, cells, 0.8 if side in POLICIES else None))
    columns = ("mode", "samples/s / bound", "samples/s", "bound", "test accuracy, %", "mean staleness")
    return Table(columns, rows)


PARTS = [
    Part(
        f"{NAME}/modes",
        "steps of four workers, by mode, and of DDP",
        sides,
        table,
        facts=("4 processes with 1 thread each", "batch size 64"),
    ),
    Part(
        f"{NAME}/slow_cable",
        f"four workers on four hosts, the cable of one of them at {RATE}",
        sides_on_hosts,
        table_on_hosts,
        facts=(
            "4 processes with 1 thread each",
            f"batch size {BATCH}",
            f"link of one host limited to {RATE_LABEL}",
        ),
        missing=lambda: no_mnist() or hosts.find_obstacle(parse_rate_and_delay(RATE, "")),
    ),
]
