"""What asynchrony gains and loses: four workers on one host, or on four of which one has a slow cable, beside DDP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from common.techniques.parameter_server.server import StalenessPolicy
from slurm.local_cluster.cables import Shape, parse_rate_and_delay
from tests.benchmarks import hosts
from tests.benchmarks.measure import Samples, Task, summarize_values
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
RATE, DDP = "100mbit", "DDP"
FREE, OTHERS = "async, no slow cable", "async, without the slow worker"
# ranks meet to write metrics, and all wait there for the slow cable: seldom, as one would set it on such a cable
ON_HOSTS = ("model=mlp", "launch.threads=1", "epochs=1", "data.test_limit=0", "log.seconds=10")
BATCH = 64
POLICIES: dict[str, tuple[Literal["sync", "async", "bounded"], int]] = {
    "sync": ("sync", 0),
    "async": ("async", 0),
    **{f"bounded, {bound}": ("bounded", bound) for bound in (0, 2, 8)},
}


# ---- one host


def sides(scratch: Path) -> list[Task]:
    ours = [run_of(scratch, side, NAME, *BRIEF, *words, "plot=false", keep=KEEP) for side, words in MODES.items()]
    return [run_of(scratch, "DDP", "ddp_multinode", *BRIEF, keep=("test_accuracy",)), *ours]


def table(taken: Samples) -> Table:
    rows = []
    for side in taken.values:
        stale = "" if side == "DDP" else taken.number(side, "staleness_mean")
        accuracy = taken.number(side, "test_accuracy", factor=100)
        rows.append(Row(side, [taken.number(side, factor=1e3), accuracy, stale]))
    return Table(("mode", "ms a step", "test accuracy, %", "mean staleness"), rows)


# ---- four hosts, of which one has a slow cable


def sides_on_hosts(scratch: Path) -> list[Task]:
    slow, shard = parse_rate_and_delay(RATE, ""), BATCH // hosts.HOSTS
    keep = (*KEEP, "pushes", "bytes_received")

    def serve(side: str, mode: str, staleness: int, cable: Shape, count: int = hosts.HOSTS) -> Task:
        bound = (f"staleness={staleness}",) if mode == "bounded" else ()
        words = (*ON_HOSTS, f"batch={shard * count}", f"mode={mode}", *bound, "plot=false")
        return hosts.run_on_hosts(scratch, side, NAME, *words, last=cable, count=count, keep=keep)

    words = (*ON_HOSTS, f"batch={BATCH}")
    ddp = hosts.run_on_hosts(scratch, DDP, "ddp_multinode", *words, last=slow, keep=("test_accuracy",))
    free = [serve(FREE, "async", 0, Shape()), serve(OTHERS, "async", 0, Shape(), hosts.HOSTS - 1)]
    return [*free, ddp, *(serve(side, *policy, slow) for side, policy in POLICIES.items())]


def compute_bounds(taken: Samples, side: str) -> list[float]:
    """Samples/s at most, round by round."""
    mode, staleness = POLICIES[side]
    policy, shard = StalenessPolicy(mode, staleness, hosts.HOSTS), BATCH / hosts.HOSTS
    size = taken.kept(side, "bytes_received_0")[0] / taken.kept(side, "pushes_0")[0]
    cable = parse_rate_and_delay(RATE, "")
    carrying = 2 * 8 * max(0, size - cable.bucket) / cable.rate  # there and back
    processors = len(os.sched_getaffinity(0))
    free, others = ([each / shard for each in taken.kept(side, "samples_per_second")] for side in (FREE, OTHERS))
    pairs = zip(free, others, strict=True)
    return [shard * compute_bound(policy, every, three, carrying, processors) for every, three in pairs]


def table_on_hosts(taken: Samples) -> Table:
    rows = []
    for side in taken.values:
        rates, cells = taken.kept(side, "samples_per_second"), list[Cell](["", ""])
        if side in POLICIES:
            bounds = compute_bounds(taken, side)
            cells = [summarize_values([a / b for a, b in zip(rates, bounds, strict=True)]), summarize_values(bounds)]
        stale = "" if side == DDP else taken.number(side, "staleness_mean")
        cells = [cells[0], summarize_values(rates), cells[1], taken.number(side, "test_accuracy", factor=100), stale]
        rows.append(Row(side, cells, 0.8 if side in POLICIES else None))
    columns = ("mode", "samples/s / bound", "samples/s", "bound", "test accuracy, %", "mean staleness")
    return Table(columns, rows)


PARTS = [
    Part(
        f"{NAME}/modes",
        "steps of four workers, by mode, and of DDP",
        sides,
        table,
        facts={"threads": "1 in each of 4 processes", "batch": 64},
    ),
    Part(
        f"{NAME}/slow_cable",
        f"four workers on four hosts, the cable of one of them at {RATE}",
        sides_on_hosts,
        table_on_hosts,
        facts={"threads": "1 in each of 4 processes", "batch": BATCH, "cable": RATE, "other programs": "not known"},
        missing=lambda: hosts.find_obstacle(parse_rate_and_delay(RATE, "")),
    ),
]
