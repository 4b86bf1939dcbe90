"""Steps of several ways of exchanging gradients or parameters, by rate of the cable, and their accuracy by bytes.

Two hosts of a local cluster run each strategy on cables of several rates. The model of a step is alpha + beta n: alpha
is what a step takes where the cable sets no limit, computing included, and beta n the time of its bytes at the rate of
the cable (see common/backend/cost.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common.measure import plots
from common.models.networks import build_network
from common.runs.result import parse_result
from common.techniques.data_parallel.ddp import POWERSGD_START_STEP
from slurm.local_cluster.cables import parse_rate_and_delay
from tests.benchmarks import hosts
from tests.benchmarks.drawing import Figure
from tests.benchmarks.measure import Samples, Task
from tests.benchmarks.mnist_pipeline import no_mnist
from tests.benchmarks.parts import Part, discard_run, finish, ignore_other_programs
from tests.benchmarks.records import Cell, Row, Table

NAME = "crossover"
COUNT = 2  # hosts
RATES = ("50mbit", "200mbit", "1gbit")
FREE = "no limit"
EVERY = 8  # local steps in a round
RANK = 2  # columns of PowerSGD's matrices
# the row of the step before the first one that counts: PowerSGD begins in the tenth, a round ends with the 16th
FIRST = 15
FLOAT_BYTES = 4
BATCH = 64
ON_MNIST = ("launch.threads=1", "data.fallback=none", "data.test_limit=0", "epochs=1", f"batch={BATCH}")
CABLE_BATCH = 32
BRIEF = ("data.name=digits", f"batch={CABLE_BATCH}", "launch.threads=1", "steps=40", "data.test_limit=10")


class Strategy(NamedTuple):
    """A way of training: the experiment and its settings."""

    experiment: str
    settings: tuple[str, ...] = ()


DDP = "DDP, float32"
LOCAL = f"local SGD, H = {EVERY}"
POWERSGD = "DDP, PowerSGD"
POWERSGD_RATE = "optim.lr=0.01"
POWERSGD_SETTINGS = ("communication=powersgd", f"powersgd_rank={RANK}", POWERSGD_RATE)
STRATEGIES = {
    DDP: Strategy("ddp_multinode"),
    "DDP, bf16": Strategy("ddp_multinode", ("communication=bf16",)),
    POWERSGD: Strategy("ddp_multinode", POWERSGD_SETTINGS),
    LOCAL: Strategy("local_sgd", (f"every={EVERY}",)),
}
DDP_AT_POWERSGD_RATE = f"{DDP}, {POWERSGD_RATE}"
# DDP with the learning rate of PowerSGD shows how much accuracy this rate alone costs.
ACCURACY_STRATEGIES = STRATEGIES | {DDP_AT_POWERSGD_RATE: Strategy("ddp_multinode", (POWERSGD_RATE,))}


def list_shapes() -> Iterator[tuple[int, int]]:
    """Yield rows and columns of each parameter of the ConvNet as PowerSGD sees it; a vector has one row."""
    for parameter in build_network("convnet", (28, 28), 10).parameters():
        rows = parameter.shape[0] if parameter.ndim > 1 else 1
        yield rows, parameter.numel() // rows


def count_bytes(strategy: str) -> float:
    """Return the bytes that one of two ranks sends in a step, on average: as many as it holds, in a ring all-reduce.

    PowerSGD sends r (rows + columns) numbers of a matrix where that is less than half of it, and vectors as they are.
    """
    full = 0
    compressed = 0
    for rows, columns in list_shapes():
        size = rows * columns
        full += size
        compressed += min(RANK * (rows + columns), size) if is_thin(rows, columns) else size
    numbers = {DDP: full, "DDP, bf16": full / 2, POWERSGD: compressed, LOCAL: full / EVERY, DDP_AT_POWERSGD_RATE: full}
    return FLOAT_BYTES * numbers[strategy]


def count_run_bytes(strategy: str, steps: int) -> float:
    """Return the bytes that one of two ranks sends in a run. The first steps of PowerSGD send whole gradients."""
    whole_steps = min(steps, POWERSGD_START_STEP - 1) if strategy == POWERSGD else 0
    return whole_steps * count_bytes(DDP) + (steps - whole_steps) * count_bytes(strategy)


def is_thin(rows: int, columns: int) -> bool:
    """Return whether torch's PowerSGD sends a parameter as thin matrices."""
    return rows > 1 and 2 * RANK * (rows + columns) < rows * columns


# ---- time by rate


def measure_rate(scratch: Path, rate: str) -> Task:
    """A cluster with cables of that rate, and a run of each strategy on it; of each the seconds of a step."""

    def run(number: int) -> dict[str, float]:
        seconds = {}
        with hosts.local_cluster(scratch, COUNT, rate=rate) as cluster:
            before = cluster.measure_load()
            for name, (experiment, settings) in STRATEGIES.items():
                settings_of_round = (*BRIEF, *settings, f"seed={number}")
                folder = finish(scratch, name, experiment, *settings_of_round, nodes=COUNT, env=cluster.env)
                seconds[name], _ = hosts.time_steps(folder, FIRST)
                discard_run(folder)
            others = cluster.measure_load().compute_other_share(before)
        return {"seconds": sum(seconds.values()), "others": others, **seconds}

    return Task(rate or FREE, run)


def format_rate(rate: str) -> str:
    """Format a rate for a table: 200 Mbit/s for 200mbit."""
    return rate.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")


def predict_seconds(free: float, strategy: str, rate: str) -> float:
    """Return alpha + beta n in seconds: a step on a cable of that rate, `free` being what it takes without a limit."""
    return free + 8 * count_bytes(strategy) / parse_rate_and_delay(rate, "").rate


def table(samples: Samples) -> Table:
    rows = []
    for strategy in STRATEGIES:
        milliseconds = samples.number(FREE, strategy, 1e3)
        rows.append(Row(f"{strategy}, {FREE}", [milliseconds, "", "", f"{count_bytes(strategy) / 1e3:,.0f}"]))
    for rate in RATES:
        for strategy in STRATEGIES:
            predicted = predict_seconds(samples.number(FREE, strategy).value, strategy, rate)
            milliseconds = samples.number(rate, strategy, 1e3)
            gain: Cell = "" if strategy == DDP else samples.ratio_of(rate, DDP, strategy)
            rows.append(Row(f"{strategy}, {format_rate(rate)}", [milliseconds, f"{1e3 * predicted:,.3g}", gain, ""]))
    heads = ("ms per step", "predicted ms: alpha + beta n", f"speedup over {DDP}", "kB sent per step")
    return Table(("strategy, link rate", *heads), rows)


# ---- accuracy by bytes


class Trace(NamedTuple):
    """What was measured of a strategy, and the line of the model."""

    points: list[tuple[float, float, float]]
    """Mbit/s, ms, half the spread."""
    line: list[tuple[float, float]]
    """Mbit/s, ms."""


def make_trace(part: Mapping[str, Any], strategy: str) -> Trace:
    """Return the trace of a strategy."""
    samples = Samples.from_part(part)
    points = []
    for rate in RATES:
        times = [1e3 * seconds for seconds in samples.list_counted(rate, strategy)]
        megabits = parse_rate_and_delay(rate, "").rate / 1e6
        points.append((megabits, median(times), (max(times) - min(times)) / 2))

    free = median(samples.list_counted(FREE, strategy))
    line = []
    for k in range(41):
        megabits = 30 * 50 ** (k / 40)
        line.append((megabits, 1e3 * predict_seconds(free, strategy, f"{megabits:.3f}mbit")))
    return Trace(points, line)


def measure_accuracy(scratch: Path, name: str) -> Task:
    """An epoch on MNIST with two ranks on this host; the test accuracy, and the bytes that a rank hands over."""
    experiment, settings = ACCURACY_STRATEGIES[name]

    def run(number: int) -> dict[str, float]:
        folder = finish(scratch, name, experiment, *ON_MNIST, *settings, f"seed={number}")
        result = parse_result(folder.result).flatten_values()
        steps = [row for row in folder.read_metrics() if row.get("loss") is not None]
        discard_run(folder)
        return {
            "seconds": result["step_seconds"],
            "test_accuracy": result["test_accuracy"],
            "bytes": result.get("bytes_sent", count_run_bytes(name, len(steps))),
        }

    return ignore_other_programs(Task(name, run))


def accuracy_table(samples: Samples) -> Table:
    rows = []
    for name in samples.values:
        loss: Cell = "" if name == DDP else samples.difference(DDP, name, "test_accuracy", 100)
        accuracy = samples.number(name, "test_accuracy", 100)
        rows.append(Row(name, [accuracy, loss, samples.number(name, "bytes", 1e-6)]))
    return Table(("strategy", "test accuracy, %", f"percentage points below {DDP}", "MB sent per rank"), rows)


def sides(scratch: Path) -> Sequence[Task]:
    return [measure_rate(scratch, rate) for rate in ("", *RATES)]


def draw_rates(path: Path, part: Mapping[str, Any]) -> None:
    """Draw the milliseconds of a step against the rate of the cable: measured points and the lines of the model."""
    axes = plots.make_axes()
    for number, strategy in enumerate(STRATEGIES):
        trace = make_trace(part, strategy)
        color = f"C{number}"
        rates, means, spread = zip(*trace.points, strict=True)
        axes.errorbar(rates, means, spread, marker="o", linestyle="", capsize=3, color=color, label=strategy)
        axes.plot(*zip(*trace.line, strict=True), linestyle="--", color=color)
    axes.plot([], [], linestyle="--", color="0.35", label="predicted: alpha + beta n")
    axes.set(xlabel="Mbit/s", ylabel="ms per step", xscale="log", yscale="log", title="ConvNet on two hosts")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    plots.save_with_legend(axes, path)


def draw_accuracy(path: Path, part: Mapping[str, Any]) -> None:
    """Draw the test accuracy after an epoch against the bytes that a rank sends for it."""
    axes = plots.make_axes()
    for row in part["table"]["rows"]:
        accuracy, _, megabytes = row["cells"]
        half_spread = (accuracy["high"] - accuracy["low"]) / 2
        axes.errorbar(megabytes["value"], accuracy["value"], half_spread, marker="o", capsize=3, label=row["what"])
    axes.set(xlabel="MB sent by a rank", ylabel="test accuracy, %", xscale="log", title="One epoch of MNIST, two ranks")
    plots.save_with_legend(axes, path)


PARTS = [
    Part(
        f"{NAME}/rates",
        f"a step of two hosts by strategy, on cables of {', '.join(RATES)}: the ConvNet, batch {CABLE_BATCH}",
        sides,
        table,
        facts=("2 processes with 1 thread each", f"batch size {CABLE_BATCH}"),
        missing=lambda: hosts.find_obstacle(parse_rate_and_delay(RATES[0], "")),
    ),
    Part(
        f"{NAME}/accuracy",
        "test accuracy after one epoch of MNIST by strategy, and the bytes that it takes",
        lambda scratch: [measure_accuracy(scratch, name) for name in ACCURACY_STRATEGIES],
        accuracy_table,
        facts=("2 processes with 1 thread each", f"batch size {BATCH}"),
        missing=no_mnist,
    ),
]
FIGURES: dict[str, Figure] = {
    "local_sgd_crossover": (f"{NAME}/rates", draw_rates),
    "local_sgd_bytes": (f"{NAME}/accuracy", draw_accuracy),
}
