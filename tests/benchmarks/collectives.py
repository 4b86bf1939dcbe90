"""What an all-reduce costs: runs of the experiment with two ranks, in each of which all sides take turns."""

from __future__ import annotations

import shutil
from pathlib import Path

from common.runs.result import parse_result
from tests.benchmarks.measure import Samples, Task
from tests.benchmarks.parts import Part, finish
from tests.benchmarks.records import Cell, Row, Table

NAME = "collectives"
SIDES = ("gloo", "isend ring")
RATIO = "gloo / isend ring"
RUN = "run"
WORDS = ("processes_per_node=2", "launch.threads=1", "plot=false")
SIZES = ("sizes=[4,4K,64K,1M,4M,25M]", "rounds=20")


def measure_sizes(scratch: Path, *words: str) -> Task:
    """A run; of each operation and size the seconds of each side, and the lines fitted to them."""

    def run(number: int) -> dict[str, float]:
        folder = finish(scratch, RUN, NAME, *WORDS, f"seed={number}", *words)
        result = parse_result(folder.result)
        measured = result.measured
        found = {f"{p['op']}, {p['bytes']:,} bytes: {p['side']}": p["seconds"] for p in measured["points"]}
        for point, _, side in [name.partition(": ") for name in found]:
            if side == SIDES[1]:
                found[f"{RATIO}, {point}"] = found[f"{point}: {SIDES[0]}"] / found[f"{point}: {side}"]
        for name, line in measured["lines"].items():
            found |= {f"{name}: {part}": value for part, value in line.items()}
        shutil.rmtree(folder.path.parent)
        return {"seconds": result.timings["step_seconds"]} | found

    return Task(RUN, run)


def sides(scratch: Path) -> list[Task]:
    return [measure_sizes(scratch, *SIZES)]


def table(taken: Samples) -> Table:
    rows, found = [], taken.values[RUN]
    for point in dict.fromkeys(name.partition(": ")[0] for name in found if " bytes: " in name):
        names = {f"{point}: {side}": 1e6 for side in SIDES} | {f"{RATIO}, {point}": 1.0}
        cells: list[Cell] = [taken.number(RUN, name, factor) if name in found else "" for name, factor in names.items()]
        rows.append(Row(point, cells))
    return Table(("operation", *(f"us: {side}" for side in SIDES), RATIO), rows)


PARTS = [
    Part(
        f"{NAME}/sizes",
        "sending and all-reduce by size, of gloo and of a ring of isend and irecv",
        sides,
        table,
        facts={"threads": "1 in each of 2 processes"},
    )
]
