"""What an all-reduce costs: runs of the experiment with two ranks, in each of which all sides take turns."""

from __future__ import annotations

import shutil
from pathlib import Path

from common.runs.result import parse_result
from tests.benchmarks.measure import Samples, Task
from tests.benchmarks.parts import Part, finish
from tests.benchmarks.records import Cell, Row, Table, at_least, at_most

NAME, RUN = "collectives", "run"
SIDES = ("gloo", "isend ring", "ring, network", "ring, memory", "star, memory")
RATIO = "gloo / isend ring"
SETTINGS = ("processes_per_node=2", "launch.threads=1", "plot=false")
SIZES = ("sizes=[4,64K,1M,4M,25M]", "rounds=20")
ENCRYPTING = (
    *("launch.backend=builtin", "launch.tls=true", "launch.transport=network"),
    *("ops=[all_reduce]", "algorithms=[ring]", "transports=[network,tls]"),
)
GOALS = {
    "ring, network": {64 << 10: 0.85, 1 << 20: 0.85, 4 << 20: 1.2, 25 << 20: 1.2},
    "ring, memory": {4 << 20: 1.8, 25 << 20: 1.8},
}
FEW = 4  # bytes
SLOWER = 1.3  # times gloo's time that few bytes may take
ENCRYPTED = {4 << 20: 2.3, 25 << 20: 2.3}  # times the seconds in the clear that encrypting may take


def name_point(op: str, size: int) -> str:
    return f"{op}, {size:,} bytes"


def measure_sizes(scratch: Path, *words: str) -> Task:
    """A run; of each point the seconds of each side and gloo's divided by them, and the lines fitted to them."""

    def run(number: int) -> dict[str, float]:
        folder = finish(scratch, RUN, NAME, *SETTINGS, f"seed={number}", *words)
        result = parse_result(folder.result)
        points = [(name_point(one["op"], one["bytes"]), one) for one in result.measured["points"]]
        found = {f"{point}: {one['side']}": float(one["seconds"]) for point, one in points}
        for point, one in points:
            found[f"gloo / {one['side']}, {point}"] = found[f"{point}: {SIDES[0]}"] / one["seconds"]
        for name, line in result.measured["lines"].items():
            found |= {f"{name}: {part}": value for part, value in line.items()}
        shutil.rmtree(folder.path.parent)
        return {"seconds": result.timings["step_seconds"]} | found

    return Task(RUN, run)


def size_table(taken: Samples) -> Table:
    """Microseconds of each side at each point, and gloo's divided by those of the ring of the script."""
    found = taken.values[RUN]

    def shown(point: str) -> list[Cell]:
        names = {f"{point}: {side}": 1e6 for side in SIDES} | {f"{RATIO}, {point}": 1.0}
        return [taken.number(RUN, name, factor) if name in found else "" for name, factor in names.items()]

    columns = ("operation", *(f"us: {side}" for side in SIDES), RATIO)
    points = dict.fromkeys(name.partition(": ")[0] for name in found if " bytes: " in name)
    return Table(columns, [Row(point, shown(point)) for point in points])


def gain_table(taken: Samples) -> Table:
    """What the built-in ring gains over gloo, and what it may cost where there are few bytes."""
    few, rows = name_point("all_reduce", FEW), []
    for side, bounds in GOALS.items():
        slower = taken.ratio_of(RUN, f"{few}: {side}", f"{few}: {SIDES[0]}")
        rows.append(at_most(f"{side} / gloo, {few}", slower, SLOWER))
        for size, bound in bounds.items():
            name = f"gloo / {side}, {name_point('all_reduce', size)}"
            rows.append(at_least(name, taken.number(RUN, name), bound))
    return Table(("measured", "value"), rows)


def tls_table(taken: Samples) -> Table:
    """What encrypting costs on the loopback interface."""
    rows = []
    for size, bound in ENCRYPTED.items():
        point = name_point("all_reduce", size)
        slower = taken.ratio_of(RUN, f"{point}: ring, tls", f"{point}: ring, network")
        rows.append(at_most(f"ring, tls / ring, network, {point}", slower, bound))
    return Table(("measured", "value"), rows)


PARTS = [
    Part(
        f"{NAME}/sizes",
        "sending and all-reduce by size: gloo, a ring of isend and irecv, and the built-in backend",
        lambda scratch: [measure_sizes(scratch, "algorithms=[ring,star]", *SIZES)],
        size_table,
        facts={"threads": "1 in each of 2 processes"},
    ),
    Part(
        f"{NAME}/gains",
        "the built-in ring against gloo",
        lambda scratch: [measure_sizes(scratch, "ops=[all_reduce]", "algorithms=[ring]", *SIZES)],
        gain_table,
        facts={"threads": "1 in each of 2 processes"},
    ),
    Part(
        f"{NAME}/tls",
        "the built-in ring through encrypted sockets against plain ones",
        lambda scratch: [measure_sizes(scratch, *ENCRYPTING, *SIZES)],
        tls_table,
        facts={"threads": "1 in each of 2 processes"},
    ),
]
