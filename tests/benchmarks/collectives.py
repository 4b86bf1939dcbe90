"""The cost of an all-reduce: runs of the experiment with two ranks, in each of which all sides take turns."""

from __future__ import annotations

import contextlib
import re
import ssl
import statistics
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.backend import certificates
from common.measure import plots
from common.ranks.links.socket_stream import PIECE_BYTES
from common.runs.folder import RunFolder
from common.runs.result import parse_result
from slurm.local_cluster.cables import parse_rate_and_delay
from tests.benchmarks import hosts
from tests.benchmarks.drawing import Figure
from tests.benchmarks.measure import Number, Samples, Task, summarize_values
from tests.benchmarks.parts import Part, discard_run, finish
from tests.benchmarks.records import Cell, Row, Table, at_least, at_most, make_value_table

NAME = "collectives"
RUN = "run"
ROUNDS = "rounds=20"
SIDES = ("gloo", "isend ring", "ring, network", "ring, memory", "star, memory")
RATIO = "gloo / isend ring"
SETTINGS = ("launch.threads=1", "plot=false")
SIZES = ("sizes=[4,64K,1M,4M,25M]", ROUNDS)
CABLE_SETTINGS = ("ops=[all_reduce]", "algorithms=[ring,star]", "sizes=[1M]", ROUNDS)
ENCRYPTING = (
    *("launch.backend=builtin", "launch.tls=true", "launch.transport=network"),
    *("ops=[all_reduce]", "algorithms=[ring]", "transports=[network,tls]"),
)
SLOW = "100mbit"  # rate of cables
FAST = "200mbit"
SLOW_LABEL = SLOW.replace("mbit", " Mbit/s")
FAST_LABEL = FAST.replace("mbit", " Mbit/s")
GOALS = {
    "ring, network": {64 << 10: 0.85, 1 << 20: 0.85, 4 << 20: 1.2, 25 << 20: 1.2},
    "ring, memory": {4 << 20: 1.8, 25 << 20: 1.8},
}
SMALL_BYTES = 4
FEWEST_MESSAGES = "halving_doubling"  # what auto chooses for few bytes between two ranks
MAX_SLOWDOWN = 1.3  # times gloo's time that few bytes may take
# by bytes: times the seconds in the clear that encrypting may take
MAX_ENCRYPTED_SLOWDOWNS = {4 << 20: 2.3, 25 << 20: 2.3}
OPENSSL = "OpenSSL"
CIPHER = "aes-256-gcm"  # the cipher that TLS 1.3 prefers
RECORD_BYTES = 16384  # the largest TLS record
PIECES = 200  # number of pieces that are encrypted and decrypted to measure their time


def name_point(op: str, size: int) -> str:
    return f"{op}, {size:,} bytes"


def run_once(scratch: Path, settings: tuple[str, ...], count: int, rate: str) -> tuple[RunFolder, dict[str, float]]:
    """Run the experiment on two ranks of this host, or with a rank on each of `count` hosts.

    Also returns `others`, the load of other programs, for a run on a cluster. Without a cluster, the dict is empty,
    because `Samples.add` measures the load.
    """
    if not count:
        return finish(scratch, RUN, NAME, "processes_per_node=2", *settings), {}
    with hosts.local_cluster(scratch, count, rate=rate) as cluster:
        before = cluster.measure_load()
        folder = finish(scratch, RUN, NAME, *settings, nodes=count, env=cluster.env)
        return folder, {"others": cluster.measure_load().compute_other_share(before)}


def list_point_numbers(points: list[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of each side at each point, gloo's divided by them, and the bytes sent."""
    seconds = {}
    for point in points:
        label = f"{name_point(point['op'], point['bytes'])}: {point['side']}"
        seconds[label] = float(point["seconds"])

    numbers = dict(seconds)
    for point in points:
        label = name_point(point["op"], point["bytes"])
        side = point["side"]
        numbers[f"gloo / {side}, {label}"] = seconds[f"{label}: {SIDES[0]}"] / point["seconds"]
        for column in ("bytes_sent", "interface_bytes"):
            numbers[f"{label}: {side}, {column}"] = sum(point[column])
    return numbers


def measure_sizes(scratch: Path, *settings: str, count: int = 0, rate: str = "") -> Task:
    """A run; of each point the seconds of each side and gloo's divided by them, and the lines fitted to them.

    With `count` it has a rank on each of so many hosts, whose cables have that rate.
    """

    def run(number: int) -> dict[str, float]:
        folder, load = run_once(scratch, (*SETTINGS, f"seed={number}", *settings), count, rate)
        result = parse_result(folder.result)
        discard_run(folder)

        numbers = {"seconds": result.timings["step_seconds"], **load}
        numbers |= list_point_numbers(result.measured["points"])
        for name, line in result.measured["lines"].items():
            for coefficient, fitted in line.items():
                numbers[f"{name}: {coefficient}"] = fitted
        return numbers

    return Task(RUN, run)


def size_table(samples: Samples) -> Table:
    """Return the microseconds of each side at each point, and gloo's divided by those of the ring of the script."""
    columns = samples.values[RUN]
    points = dict.fromkeys(name.partition(": ")[0] for name in columns if " bytes: " in name)

    def make_cell(name: str, factor: float = 1.0) -> Cell:
        return samples.number(RUN, name, factor) if name in columns else ""

    rows = []
    for point in points:
        cells = [make_cell(f"{point}: {side}", 1e6) for side in SIDES]
        rows.append(Row(point, [*cells, make_cell(f"{RATIO}, {point}")]))
    heads = [f"us: {side}" for side in SIDES]
    return Table(("operation", *heads, RATIO), rows)


def gain_table(samples: Samples) -> Table:
    """Return what the built-in ring gains over gloo, and what it may cost for few bytes."""
    small = name_point("all_reduce", SMALL_BYTES)
    rows = []
    for side, bounds in GOALS.items():
        for algorithm in (side, side.replace("ring", FEWEST_MESSAGES)):
            slowdown = samples.ratio_of(RUN, f"{small}: {algorithm}", f"{small}: {SIDES[0]}")
            rows.append(at_most(f"{algorithm} / gloo, {small}", slowdown, MAX_SLOWDOWN))
        for size, bound in bounds.items():
            name = f"gloo / {side}, {name_point('all_reduce', size)}"
            rows.append(at_least(name, samples.number(RUN, name), bound))
    return make_value_table(rows)


def measure_encryption(samples: Samples, point: str) -> Number:
    """Return the time of an encrypted ring by that of a plain one."""
    return samples.ratio_of(RUN, f"{point}: ring, tls", f"{point}: ring, network")


def measure_encryption_alone(scratch: Path) -> Task:
    """Seconds to encrypt and decrypt a byte without sending it: the cipher alone, and with the records of TLS."""
    folder = scratch / "identity"
    certificates.create_identity_files(folder, seconds=86_400)
    identity = certificates.load_identity(folder)

    def run(number: int) -> dict[str, float]:
        cipher = measure_openssl() + measure_openssl("-decrypt")
        return {"seconds": cipher, "records": measure_records(identity)}

    return Task(OPENSSL, run)


def measure_openssl(*options: str) -> float:
    """Return the seconds per byte of the program `openssl speed` in each of two processes that run at the same time."""
    speed = ["openssl", "speed", "-evp", CIPHER, "-bytes", str(RECORD_BYTES), "-seconds", "1", "-elapsed"]
    process = subprocess.run([*speed, "-multi", "2", "-mr", *options], capture_output=True, text=True, check=True)
    bytes_per_second = re.findall(r"^\+F:\d+:\S+:([\d.]+)$", process.stdout, re.MULTILINE)
    return 2 / float(bytes_per_second[-1])  # the last line is the sum of both processes


def measure_records(identity: certificates.Identity) -> float:
    """Return the seconds per byte to encrypt and decrypt with Python's ssl module, within this process."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = identity.client.wrap_bio(to_client, to_server)
    server = identity.server.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()

    piece = bytes(PIECE_BYTES)
    seconds = []
    for _ in range(PIECES):
        start = time.perf_counter()
        client.write(piece)
        received = 0
        while received < PIECE_BYTES:
            received += len(server.read(PIECE_BYTES))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) / PIECE_BYTES


def compute_encryption_bound(samples: Samples, point: str, size: int, name: str) -> Number:
    """Return the time of a plain ring plus that of encrypting and decrypting all bytes, by the time of a plain ring.

    In an all-reduce of two ranks, each rank sends and receives as many bytes as the tensor contains. `name` selects the
    seconds per byte.
    """
    plain = samples.list_counted(RUN, f"{point}: ring, network")
    alone = samples.list_counted(OPENSSL, name)
    return summarize_values([1 + size * per_byte / seconds for seconds, per_byte in zip(plain, alone, strict=True)])


def tls_table(samples: Samples) -> Table:
    """Return what encrypting costs on the loopback interface."""
    rows = []
    for size, bound in MAX_ENCRYPTED_SLOWDOWNS.items():
        point = name_point("all_reduce", size)
        slowdown = measure_encryption(samples, point)
        bounds = [compute_encryption_bound(samples, point, size, name) for name in ("records", "seconds")]
        rows.append(Row(f"ring, tls / ring, network, {point}", [slowdown, *bounds], bound, at_least=False))
    return Table(("measured", "value", "bound: TLS records", "bound: cipher alone"), rows)


def cable_table(samples: Samples) -> Table:
    """Return a star's time by a ring's if every host has one cable, and the bytes of both beside the formula."""
    point = name_point("all_reduce", 1 << 20)
    slowdown = samples.ratio_of(RUN, f"{point}: star, network", f"{point}: ring, network")
    label = f"star / ring, {point} at {SLOW_LABEL}"
    rows = [at_least(label, slowdown, 3.6), at_most(label, slowdown, 4.2)]
    formula_bytes = 2 * (hosts.HOSTS - 1) << 20
    for side in ("ring", "star"):
        for name, bound in (("bytes_sent", 1.01), ("interface_bytes", 1.06)):
            share = samples.number(RUN, f"{point}: {side}, network, {name}", 1 / formula_bytes)
            label = f"{side}, {name} / (2 (p - 1) n)"
            rows += [at_most(label, share, bound), at_least(label, share, 2 - bound)]
    return make_value_table(rows)


def tls_cable_table(samples: Samples) -> Table:
    """Return what encrypting costs where the cable is the limit."""
    point = name_point("all_reduce", 4 << 20)
    slowdown = measure_encryption(samples, point)
    return make_value_table([at_most(f"ring, tls / ring, network, {point} at {FAST_LABEL}", slowdown, 1.05)])


def list_curves(medians: Mapping[str, float]) -> dict[str, list[tuple[float, float, float]]]:
    """Return the points of each side of an all-reduce: bytes, microseconds, no spread."""
    curves: dict[str, list[tuple[float, float, float]]] = {}
    for name, seconds in medians.items():
        point, _, side = name.partition(": ")
        match = re.fullmatch(r"all_reduce, ([\d,]+) bytes", point)
        if match and side in SIDES:
            size = float(match[1].replace(",", ""))
            curves.setdefault(side, []).append((size, 1e6 * seconds, 0.0))
    return curves


def draw_collectives(path: Path, part: Mapping[str, Any]) -> None:
    """Draw the microseconds of an all-reduce against its size, with the fitted lines."""
    medians = {name: statistics.median(column) for name, column in part["samples"]["run"].items()}
    curves = list_curves(medians)
    fits = {}
    for side, points in curves.items():
        alpha = medians[f"all_reduce float32 {side}: alpha"]
        beta = medians[f"all_reduce float32 {side}: beta"]
        first_size = points[0][0]
        last_size = points[-1][0]
        sizes = [first_size * (last_size / first_size) ** (i / 15) for i in range(16)]
        fitted = [(size, 1e6 * (alpha + beta * size), 0.0) for size in sizes]
        fits[side] = (f"{side}, fitted", fitted)
    title = "All-reduce of two ranks, fitted: alpha + beta n"
    plots.draw_curves(path, curves, "bytes", "microseconds", fits=fits, loglog=True, title=title)


PARTS = [
    Part(
        f"{NAME}/sizes",
        "sending and all-reduce by size: gloo, a ring of isend and irecv, and the built-in backend",
        lambda scratch: [measure_sizes(scratch, "algorithms=[ring,star]", *SIZES)],
        size_table,
        facts=("2 processes with 1 thread each",),
    ),
    Part(
        f"{NAME}/gains",
        "the built-in ring against gloo",
        lambda scratch: [measure_sizes(scratch, "ops=[all_reduce]", f"algorithms=[ring,{FEWEST_MESSAGES}]", *SIZES)],
        gain_table,
        rounds=10,
        facts=("2 processes with 1 thread each",),
    ),
    Part(
        f"{NAME}/tls",
        "the built-in ring through encrypted sockets against plain ones",
        lambda scratch: [measure_sizes(scratch, *ENCRYPTING, *SIZES), measure_encryption_alone(scratch)],
        tls_table,
        facts=("2 processes with 1 thread each",),
    ),
    Part(
        f"{NAME}/cables",
        f"a star against a ring of four hosts with cables of {SLOW}",
        lambda scratch: [measure_sizes(scratch, *CABLE_SETTINGS, count=hosts.HOSTS, rate=SLOW)],
        cable_table,
        facts=(
            "4 processes with 1 thread each",
            f"links limited to {SLOW_LABEL}",
        ),
        missing=lambda: hosts.find_obstacle(parse_rate_and_delay(SLOW, "")),
    ),
    Part(
        f"{NAME}/tls_cable",
        f"the built-in ring of two hosts with cables of {FAST}, encrypted and plain",
        lambda scratch: [measure_sizes(scratch, *ENCRYPTING, "sizes=[4M]", ROUNDS, count=2, rate=FAST)],
        tls_cable_table,
        facts=(
            "2 processes with 1 thread each",
            f"links limited to {FAST_LABEL}",
        ),
        missing=lambda: hosts.find_obstacle(parse_rate_and_delay(FAST, "")),
    ),
]
FIGURES: dict[str, Figure] = {NAME: (f"{NAME}/gains", draw_collectives)}
