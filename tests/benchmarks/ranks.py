"""The gain of a second rank: the comparison of every experiment that declares no others."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.measure import Samples, Task
from tests.benchmarks.parts import Part, run_of
from tests.benchmarks.records import Row, Table, list_step_times, make_value_table

BRIEF = ("steps=60", "launch.threads=1")
RANKS = {"1 process": 1, "2 processes": 2}


def table(samples: Samples) -> Table:
    gain = samples.ratio("1 process", "2 processes", 0.5)
    rows = list_step_times(samples)
    rows.append(Row("samples/s: 2 processes / (2 x 1 process)", [gain]))
    return make_value_table(rows)


def make_part(name: str) -> Part:
    """The comparison of an experiment of configs.dataparallel.Replicated."""

    def sides(scratch: Path) -> list[Task]:
        return [run_of(scratch, side, name, *BRIEF, f"processes_per_node={count}") for side, count in RANKS.items()]

    return Part(
        f"{name}/ranks", "a training step with two ranks and with one", sides, table, facts=("1 thread per process",)
    )
