"""Gains of a second process or a second thread: ResNet-18 on 28 px, global batch 64."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.drawing import Figure, make_bar_drawer
from tests.benchmarks.measure import Samples, Task
from tests.benchmarks.parts import Part, run_of
from tests.benchmarks.records import Row, Table

NAME = "resnet_dataparallel"
BATCH = 64
SIDES = {
    "one process, 1 thread": ("strategy=single", "launch.threads=1"),
    "one process, 2 threads": ("strategy=single", "launch.threads=2"),
    "DDP, 2 processes with 1 thread": ("strategy=ddp", "launch.threads=1"),
    "DDP with synchronized BatchNorm": ("strategy=ddp", "launch.threads=1", "sync_batchnorm=true"),
}


def sides(scratch: Path) -> list[Task]:
    shared = (f"batch={BATCH}", "steps=8", "data.test_limit=50", "compare=false")
    return [run_of(scratch, name, NAME, *shared, *settings) for name, settings in SIDES.items()]


def table(samples: Samples) -> Table:
    first = next(iter(SIDES))
    rows = []
    for name in SIDES:
        rates = sorted(BATCH / seconds for seconds in samples.list_counted(name))
        median_rate = rates[len(rates) // 2]
        speed = samples.ratio(first, name)
        rows.append(Row(name, [samples.number(name, factor=1e3), f"{median_rate:.0f}", speed]))
    return Table(("strategy", "ms per step", "samples/s", "speedup over one thread"), rows)


PARTS = [
    Part(
        f"{NAME}/strategies",
        "ResNet-18, 28 px, batch 64: one process and DDP",
        sides,
        table,
        facts=("numbers of threads as stated in the table", f"batch size {BATCH}"),
    )
]
FIGURES: dict[str, Figure] = {NAME: (f"{NAME}/strategies", make_bar_drawer("ResNet-18, batch 64"))}
