"""What asynchrony gains and loses: four workers with the small ConvNet on one host, and DDP beside them."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.measure import Samples, Task
from tests.benchmarks.parts import Part, run_of
from tests.benchmarks.records import Row, Table

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


PARTS = [
    Part(
        f"{NAME}/modes",
        "steps of four workers, by mode, and of DDP",
        sides,
        table,
        facts={"threads": "1 in each of 4 processes", "batch": 64},
    )
]
