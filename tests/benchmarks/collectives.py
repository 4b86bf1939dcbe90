"""What an all-reduce costs: runs of the experiment with two ranks, in each of which all sides take turns."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common.measure import plots
from common.runs.folder import RunFolder
from common.runs.result import parse_result
from slurm.local_cluster.cables import parse_rate_and_delay
from tests.benchmarks import hosts
from tests.benchmarks.drawing import Figure
from tests.benchmarks.measure import Number, Samples, Task
from tests.benchmarks.parts import Part, finish
from tests.benchmarks.records import Cell, Row, Table, at_least, at_most

NAME, RUN, ROUNDS = "collectives", "run", "rounds=20"
SIDES = ("gloo", "isend ring", "ring, network", "ring, memory", "star, memory")
RATIO = "gloo / isend ring"
SETTINGS = ("launch.threads=1", "plot=false")
SIZES = ("sizes=[4,64K,1M,4M,25M]", ROUNDS)
ENCRYPTING = (
    *("launch.backend=builtin", "launch.tls=true", "launch.transport=network"),
    *("ops=[all_reduce]", "algorithms=[ring]", "transports=[network,tls]"),
)
SLOW, FAST = "100mbit", "200mbit"  # of cables
GOALS = {
    "ring, network": {64 << 10: 0.85, 1 << 20: 0.85, 4 << 20: 1.2, 25 << 20: 1.2},
    "ring, memory": {4 << 20: 1.8, 25 << 20: 1.8},
}
FEW, FEWEST_MESSAGES = 4, "halving_doubling"  # bytes; what auto takes for them between two ranks
SLOWER = 1.3  # times gloo's time that few bytes may take
ENCRYPTED = {4 << 20: 2.3, 25 << 20: 2.3}  # times the seconds in the clear that encrypting may take


def name_point(op: str, size: int) -> str:
    return f"{op}, {size:,} bytes"


def measure_sizes(scratch: Path, *words: str, count: int = 0, rate: str = "") -> Task:
    """A run; of each point the seconds of each side and gloo's divided by them, and the lines fitted to them.

    With `count` it has a rank on each of so many hosts, whose cables have that rate.
    """

    def finish_run(number: int) -> RunFolder:
        given = (*SETTINGS, f"seed={number}", *words)
        if not count:
            return finish(scratch, RUN, NAME, "processes_per_node=2", *given)
        with hosts.local_cluster(scratch, count, rate=rate) as env:
            return finish(scratch, RUN, NAME, *given, nodes=count, env=env)

    def run(number: int) -> dict[str, float]:
        folder = finish_run(number)
        result = parse_result(folder.result)
        points = [(name_point(one["op"], one["bytes"]), one) for one in result.measured["points"]]
        found = {f"{point}: {one['side']}": float(one["seconds"]) for point, one in points}
        for point, one in points:
            found[f"gloo / {one['side']}, {point}"] = found[f"{point}: {SIDES[0]}"] / one["seconds"]
            for what in ("bytes_sent", "interface_bytes"):
                found[f"{point}: {one['side']}, {what}"] = sum(one[what])
        for name, line in result.measured["lines"].items():
            found |= {f"{name}: {part}": value for part, value in line.items()}
        shutil.rmtree(folder.path.parent)
        return {"seconds": result.timings["step_seconds"]} | ({"others": 0.0} if count else {}) | found

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
        for one in (side, side.replace("ring", FEWEST_MESSAGES)):
            slower = taken.ratio_of(RUN, f"{few}: {one}", f"{few}: {SIDES[0]}")
            rows.append(at_most(f"{one} / gloo, {few}", slower, SLOWER))
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


def cable_table(taken: Samples) -> Table:
    """A star's time by a ring's where every host has one cable, and the bytes of both beside the formula."""
    point = name_point("all_reduce", 1 << 20)
    slower = taken.ratio_of(RUN, f"{point}: star, network", f"{point}: ring, network")
    what = f"star / ring, {point} on {SLOW}"
    rows = [at_least(what, slower, 3.6), at_most(what, slower, 4.2)]
    for side in ("ring", "star"):
        for name, bound in (("bytes_sent", 1.01), ("interface_bytes", 1.06)):
            share = taken.number(RUN, f"{point}: {side}, network, {name}", 1 / (2 * (hosts.HOSTS - 1) << 20))
            rows += [row(f"{side}, {name} / 2 (p - 1) n", share, limit) for row, limit in both_ways(bound)]
    return Table(("measured", "value"), rows)


def both_ways(bound: float) -> list[tuple[Callable[[str, Number, float], Row], float]]:
    return [(at_most, bound), (at_least, 2 - bound)]


def tls_cable_table(taken: Samples) -> Table:
    """What encrypting costs where the cable is the limit."""
    point = name_point("all_reduce", 4 << 20)
    slower = taken.ratio_of(RUN, f"{point}: ring, tls", f"{point}: ring, network")
    return Table(("measured", "value"), [at_most(f"ring, tls / ring, network, {point} on {FAST}", slower, 1.05)])


def draw_collectives(path: Path, part: Mapping[str, Any]) -> None:
    """Microseconds of an all-reduce against its size, with the fitted lines."""
    medians = {name: statistics.median(values) for name, values in part["samples"]["run"].items()}
    series: dict[str, list[tuple[float, float, float]]] = {}
    for name, seconds in medians.items():
        point, _, side = name.partition(": ")
        if point.startswith("all_reduce, ") and point.endswith(" bytes") and side in SIDES:
            size = float(point.removeprefix("all_reduce, ").removesuffix(" bytes").replace(",", ""))
            series.setdefault(side, []).append((size, 1e6 * seconds, 0.0))
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for side, points in series.items():
        alpha, beta = (medians[f"all_reduce float32 {side}: {part}"] for part in ("alpha", "beta"))
        least, most = points[0][0], points[-1][0]
        across = [least * (most / least) ** (i / 60) for i in range(61)]
        lines[f"{side}, fitted"] = [(n, 1e6 * (alpha + beta * n), 0.0) for n in across]
    plots.draw_curves(path, series, "bytes", "microseconds", computed=lines, loglog=True, title="all-reduce, two ranks")


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
        lambda scratch: [measure_sizes(scratch, "ops=[all_reduce]", f"algorithms=[ring,{FEWEST_MESSAGES}]", *SIZES)],
        gain_table,
        rounds=10,
        facts={"threads": "1 in each of 2 processes"},
    ),
    Part(
        f"{NAME}/tls",
        "the built-in ring through encrypted sockets against plain ones",
        lambda scratch: [measure_sizes(scratch, *ENCRYPTING, *SIZES)],
        tls_table,
        facts={"threads": "1 in each of 2 processes"},
    ),
    Part(
        f"{NAME}/cables",
        f"a star against a ring of four hosts with cables of {SLOW}",
        lambda scratch: [
            measure_sizes(
                *(scratch, "ops=[all_reduce]", "algorithms=[ring,star]", "sizes=[1M]", ROUNDS),
                count=hosts.HOSTS,
                rate=SLOW,
            )
        ],
        cable_table,
        facts={"threads": "1 in each of 4 processes", "cable": SLOW, "other programs": "not known"},
        missing=lambda: hosts.find_obstacle(parse_rate_and_delay(SLOW, "")),
    ),
    Part(
        f"{NAME}/tls_cable",
        f"the built-in ring of two hosts with cables of {FAST}, encrypted and plain",
        lambda scratch: [measure_sizes(scratch, *ENCRYPTING, "sizes=[4M]", ROUNDS, count=2, rate=FAST)],
        tls_cable_table,
        facts={"threads": "1 in each of 2 processes", "cable": FAST, "other programs": "not known"},
        missing=lambda: hosts.find_obstacle(parse_rate_and_delay(FAST, "")),
    ),
]
FIGURES: dict[str, Figure] = {NAME: (f"{NAME}/sizes", draw_collectives)}
