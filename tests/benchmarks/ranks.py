"""What a second rank gains: the comparison of every experiment that has none of its own."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.measure import Samples, Task
from tests.benchmarks.parts import Part, run_of
from tests.benchmarks.records import Row, Table

BRIEF = ("steps=60", "launch.threads=1")
RANKS = {"1 process": 1, "2 processes": 2}


def table(taken: Samples) -> Table:
    rows = [Row(f"ms a step: {side}", [taken.number(side, factor=1e3)]) for side in taken.values]
    gain = taken.ratio("1 process", "2 processes", 0.5)
    return Table(("measured", "value"), [*rows, Row("samples/s of 2 processes / of two times one process", [gain])])


def make_part(name: str) -> Part:
    """The comparison of an experiment of configs.dataparallel.Replicated."""

    def sides(scratch: Path) -> list[Task]:
        return [run_of(scratch, side, name, *BRIEF, f"processes_per_node={count}") for side, count in RANKS.items()]

    return Part(
        f"{name}/ranks", "a training step with two ranks and with one", sides, table, facts={"threads": "1 a process"}
    )
