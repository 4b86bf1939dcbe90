"""Steps of several ways of exchanging gradients or parameters, by rate of the cable, and their accuracy by bytes.

Two hosts of a local cluster run each strategy on cables of several rates. The model of a step is alpha + beta n: alpha
is what a step takes where the cable sets no limit, computing included, and beta n the time of its bytes at the rate of
the cable (see common/backend/cost.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common.measure import plots
from common.models.networks import build_network
from common.runs.result import parse_result
from slurm.local_cluster.cables import parse_rate_and_delay
from tests.benchmarks import hosts
from tests.benchmarks.drawing import Figure
from tests.benchmarks.measure import Samples, Task
from tests.benchmarks.mnist_pipeline import no_mnist
from tests.benchmarks.parts import Part, finish
from tests.benchmarks.records import Cell, Row, Table

NAME = "crossover"
COUNT, RATES, FREE = 2, ("50mbit", "200mbit", "1gbit"), "no limit"
EVERY, RANK, NUMBER = 8, 2, 4  # local steps in a round, columns of PowerSGD's matrices, bytes of a float32
# the row of the step before the first one that counts: PowerSGD begins after ten, a round ends with the 16th
FIRST = 15
BATCH, ON_A_CABLE = 64, 32
ON_MNIST = ("launch.threads=1", "data.fallback=none", "data.test_limit=0", "epochs=1", f"batch={BATCH}")
BRIEF = ("data.name=digits", f"batch={ON_A_CABLE}", "launch.threads=1", "steps=40", "data.test_limit=10")


class Strategy(NamedTuple):
    """A way of training: the experiment and its settings."""

    experiment: str
    settings: tuple[str, ...] = ()


DDP, LOCAL = "DDP, float32", f"local SGD, H = {EVERY}"
STRATEGIES = {
    DDP: Strategy("ddp_multinode"),
    "DDP, bf16": Strategy("ddp_multinode", ("communication=bf16",)),
    "DDP, PowerSGD": Strategy("ddp_multinode", ("communication=powersgd", f"powersgd_rank={RANK}", "optim.lr=0.01")),
    LOCAL: Strategy("local_sgd", (f"every={EVERY}",)),
}


def list_shapes() -> Iterator[tuple[int, int]]:
    """Yield rows and columns of each parameter of the ConvNet as PowerSGD sees it; a vector has one row."""
    for parameter in build_network("convnet", (28, 28), 10).parameters():
        rows = parameter.shape[0] if parameter.ndim > 1 else 1
        yield rows, parameter.numel() // rows


def count_bytes(strategy: str) -> float:
    """Return the bytes that one of two ranks sends in a step, on average: as many as it holds, in a ring all-reduce.

    PowerSGD sends r (rows + columns) numbers of a matrix where that is less than half of it, and vectors as they are.
    """
    shapes = list(list_shapes())
    full = sum(rows * columns for rows, columns in shapes)
    thin = (
        min(RANK * (rows + columns), rows * columns) if is_thin(rows, columns) else rows * columns
        for rows, columns in shapes
    )
    numbers = {DDP: full, "DDP, bf16": full / 2, "DDP, PowerSGD": sum(thin), LOCAL: full / EVERY}
    return NUMBER * numbers[strategy]


def is_thin(rows: int, columns: int) -> bool:
    """Return whether torch's PowerSGD sends a parameter as thin matrices."""
    return rows > 1 and 2 * RANK * (rows + columns) < rows * columns


# ---- time by rate


def measure_rate(scratch: Path, rate: str) -> Task:
    """A cluster with cables of that rate, and a run of each strategy on it; of each the seconds of a step."""

    def run(number: int) -> dict[str, float]:
        found = {}
        with hosts.local_cluster(scratch, COUNT, rate=rate) as env:
            for name, (experiment, settings) in STRATEGIES.items():
                words = (*BRIEF, *settings, f"seed={number}")
                folder = finish(scratch, name, experiment, *words, nodes=COUNT, env=env)
                found[name] = hosts.time_steps(folder, FIRST)[0]
                shutil.rmtree(folder.path.parent)
        # the cluster's processes belong to nobody: who else used the machine is not known
        return {"seconds": sum(found.values()), "others": 0.0, **found}

    return Task(rate or FREE, run)


def predict_seconds(free: float, strategy: str, rate: str) -> float:
    """Return alpha + beta n in seconds: a step on a cable of that rate, `free` being what it takes without a limit."""
    return free + 8 * count_bytes(strategy) / parse_rate_and_delay(rate, "").rate


def table(taken: Samples) -> Table:
    rows = []
    for strategy in STRATEGIES:
        alone = taken.number(FREE, strategy, 1e3)
        rows.append(Row(f"{strategy}, {FREE}", [alone, "", "", f"{count_bytes(strategy) / 1e3:,.0f}"]))
    for rate in RATES:
        for strategy in STRATEGIES:
            predicted = predict_seconds(taken.number(FREE, strategy).value, strategy, rate)
            gain: Cell = "" if strategy == DDP else taken.ratio_of(rate, DDP, strategy)
            rows.append(
                Row(f"{strategy}, {rate}", [taken.number(rate, strategy, 1e3), f"{1e3 * predicted:,.3g}", gain, ""])
            )
    return Table(("strategy, cable", "ms a step", "alpha + beta n, ms", f"{DDP} / this", "kB a step"), rows)


def trace_lines(part: Mapping[str, Any]) -> dict[str, tuple[list[tuple[float, ...]], list[tuple[float, ...]]]]:
    """Return of each strategy what was measured, (Mbit/s, ms, half the spread), and the model's line, (Mbit/s, ms)."""
    traces = {}
    for strategy in STRATEGIES:
        found = {rate: [1e3 * value for value in part["samples"][rate][strategy]] for rate in (FREE, *RATES)}
        points: list[tuple[float, ...]] = [
            (parse_rate_and_delay(rate, "").rate / 1e6, median(found[rate]), (max(found[rate]) - min(found[rate])) / 2)
            for rate in RATES
        ]
        across = [30 * 50 ** (k / 40) for k in range(41)]  # Mbit/s
        free = median(found[FREE]) / 1e3
        line: list[tuple[float, ...]] = [
            (rate, 1e3 * predict_seconds(free, strategy, f"{rate:.3f}mbit")) for rate in across
        ]
        traces[strategy] = points, line
    return traces


# ---- accuracy by bytes


def measure_accuracy(scratch: Path, name: str) -> Task:
    """An epoch on MNIST with two ranks on this host; the test accuracy, and the bytes that a rank hands over."""
    experiment, settings = STRATEGIES[name]

    def run(number: int) -> dict[str, float]:
        folder = finish(scratch, name, experiment, *ON_MNIST, *settings, f"seed={number}")
        result = parse_result(folder.result).flatten_values()
        losses = [row for row in folder.read_metrics() if row.get("loss") is not None]
        shutil.rmtree(folder.path.parent)
        sent = result.get("bytes_sent", count_bytes(name) * len(losses))
        found = {"seconds": result["step_seconds"], "test_accuracy": result["test_accuracy"], "bytes": sent}
        return found | {"others": 0.0}  # which would change the seconds alone

    return Task(name, run)


def accuracy_table(taken: Samples) -> Table:
    rows = []
    for name in taken.values:
        less: Cell = "" if name == DDP else taken.difference(DDP, name, "test_accuracy", 100)
        rows.append(Row(name, [taken.number(name, "test_accuracy", 100), less, taken.number(name, "bytes", 1e-6)]))
    return Table(("strategy", "test accuracy, %", f"points below {DDP}", "MB sent by a rank"), rows)


def sides(scratch: Path) -> Sequence[Task]:
    return [measure_rate(scratch, rate) for rate in ("", *RATES)]


def draw_rates(path: Path, part: Mapping[str, Any]) -> None:
    """Milliseconds of a step against the rate of the cable: measured points and the lines of the model."""
    at = plots.make_axes()
    for number, (side, (points, line)) in enumerate(trace_lines(part).items()):
        across, means, spread = zip(*points, strict=True)
        at.errorbar(across, means, spread, marker="o", linestyle="", capsize=3, color=f"C{number}", label=side)
        at.plot(*zip(*line, strict=True), linestyle="--", color=f"C{number}")
    at.plot([], [], linestyle="--", color="0.35", label="alpha + beta n")
    at.set(xlabel="Mbit/s", ylabel="ms a step", xscale="log", yscale="log", title="the ConvNet on two hosts")
    at.set_xticks(across, [f"{rate:g}" for rate in across])
    plots.save_with_legend(at, path)


def draw_accuracy(path: Path, part: Mapping[str, Any]) -> None:
    """Test accuracy after an epoch against the bytes that a rank sends for it."""
    at = plots.make_axes()
    for side, found in part["samples"].items():
        values = sorted(100 * value for value in found["test_accuracy"])
        sent = median(found["bytes"]) / 1e6
        at.errorbar(sent, median(values), (values[-1] - values[0]) / 2, marker="o", capsize=3, label=side)
    at.set(xlabel="MB sent by a rank", ylabel="test accuracy, %", xscale="log", title="one epoch of MNIST, two ranks")
    plots.save_with_legend(at, path)


PARTS = [
    Part(
        f"{NAME}/rates",
        f"a step of two hosts by strategy, on cables of {', '.join(RATES)}: the ConvNet, batch {ON_A_CABLE}",
        sides,
        table,
        rounds=3,
        facts={"threads": "1 in each of 2 processes", "batch": ON_A_CABLE, "other programs": "not known"},
        missing=lambda: hosts.find_obstacle(parse_rate_and_delay(RATES[0], "")),
    ),
    Part(
        f"{NAME}/accuracy",
        "test accuracy after one epoch of MNIST by strategy, and the bytes that it takes",
        lambda scratch: [measure_accuracy(scratch, name) for name in STRATEGIES],
        accuracy_table,
        rounds=3,
        facts={"threads": "1 in each of 2 processes", "batch": BATCH},
        missing=no_mnist,
    ),
]
FIGURES: dict[str, Figure] = {
    "local_sgd_crossover": (f"{NAME}/rates", draw_rates),
    "local_sgd_bytes": (f"{NAME}/accuracy", draw_accuracy),
}
