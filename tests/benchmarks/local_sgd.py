"""Accuracy of local SGD against DDP, seed by seed, and its steps on a slow cable."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from statistics import NormalDist, mean, stdev

from common.config.config import ROOT
from common.runs.result import parse_result
from slurm.local_cluster.cables import parse_rate_and_delay
from tests.benchmarks import hosts, local_sgd_crossover
from tests.benchmarks.measure import Number, Samples, Task
from tests.benchmarks.mnist_pipeline import no_mnist
from tests.benchmarks.parts import Part, discard_run, finish, ignore_other_programs
from tests.benchmarks.records import Cell, Row, Table

NAME = "local_sgd"
SEEDS = 16
MARGIN = 0.2  # points of accuracy that local SGD may lose
BATCH = 128
SETTINGS = ("model=mlp", "data.fallback=none", f"batch={BATCH}", "epochs=1", "data.test_limit=0", "launch.threads=1")
DDP = "DDP"
SIDES = {
    DDP: ("ddp_multinode",),
    "H = 8": (NAME, "every=8"),
    "H = 8, int8": (NAME, "every=8", "communication=int8"),
    "H = 32, outer=nesterov": (NAME, "every=32", "outer=nesterov", "outer_lr=0.7"),
}
JUDGED = ("H = 8",)
RATE = "200mbit"
RATE_LABEL = RATE.replace("mbit", " Mbit/s")


# ---- accuracy


def train(scratch: Path, name: str, *settings: str) -> Task:
    """A training with the number of the round as seed."""
    experiment, *side_settings = SIDES[name]

    def run(number: int) -> dict[str, float]:
        folder = finish(scratch, name, experiment, *SETTINGS, *side_settings, *settings, f"seed={number}")
        result = parse_result(folder.result).flatten_values()
        discard_run(folder)
        measured = {
            "seconds": result["step_seconds"],
            "test_accuracy": result["test_accuracy"],
        }
        for key in ("exchanges", "bytes_sent"):
            if key in result:
                measured[key] = float(result[key])
        return measured

    return ignore_other_programs(Task(name, run))


def compute_t_quantile(freedom: int, probability: float = 0.975) -> float:
    """Return the quantile of Student's t (Abramowitz and Stegun 1964, 26.7.5), to 1 % from 4 degrees of freedom on."""
    z = NormalDist().inv_cdf(probability)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def compute_interval(values: list[float]) -> Number:
    """Return the mean with the ends of its 95 % interval, for independent values of a normal distribution."""
    count = len(values)
    half = math.inf
    if count > 1:
        half = compute_t_quantile(count - 1) * stdev(values) / math.sqrt(count)
    return Number(mean(values), mean(values) - half, mean(values) + half)


def accuracy_table(samples: Samples) -> Table:
    ddp_accuracies = samples.list_counted(DDP, "test_accuracy")
    rows = []
    for name in samples.values:
        accuracy = samples.number(name, "test_accuracy", 100)
        if name == DDP:
            rows.append(Row(name, ["", "", accuracy, "", ""]))
            continue
        pairs = zip(ddp_accuracies, samples.list_counted(name, "test_accuracy"), strict=True)
        interval = compute_interval([100 * (a - b) for a, b in pairs])
        upper_end = Number(interval.high, interval.high, interval.high)
        exchanges = samples.number(name, "exchanges")
        megabytes_sent = samples.number(name, "bytes_sent", 1e-6)
        cells: list[Cell] = [upper_end, interval, accuracy, exchanges, megabytes_sent]
        rows.append(Row(name, cells, MARGIN if name in JUDGED else None, at_least=False))
    heads = (
        f"percentage points below {DDP}, upper bound",
        f"percentage points below {DDP}, mean [95 % interval]",
    )
    return Table(("strategy", *heads, "test accuracy, %", "exchanges", "MB sent per worker"), rows)


# ---- a slow cable


def run_cable_ranks(scratch: Path, file: Path) -> float:
    """Let two hosts run all sides and write the numbers to a file. Raises RuntimeError.

    Returns the share of the machine that other programs used.
    """
    srun = ("srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1")
    program = (sys.executable, "-m", "tests.benchmarks.local_sgd_cable_ranks", str(file))
    command = [sys.executable, "-m", "slurm", "cluster", "exec", *srun, *program]
    with hosts.local_cluster(scratch, 2, rate=RATE) as cluster:
        before = cluster.measure_load()
        process = subprocess.run(
            command, cwd=ROOT, env=dict(cluster.env), capture_output=True, text=True, timeout=300, check=False
        )
        others = cluster.measure_load().compute_other_share(before)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{process.stderr[-2000:]}")
    return others


def measure_on_cable(scratch: Path) -> list[Task]:
    """All sides in one start of two hosts, in turns (tests/benchmarks/local_sgd_cable_ranks.py)."""

    def run(number: int) -> dict[str, float]:
        file = scratch / f"cable-{number}.json"
        others = run_cable_ranks(scratch, file)
        numbers_of = json.loads(file.read_text())
        measured = {
            "seconds": sum(numbers["seconds"] for numbers in numbers_of.values()),
            "others": others,
        }
        for name, numbers in numbers_of.items():
            for column, number_of_side in numbers.items():
                measured[f"{name}: {column}"] = number_of_side
        return measured

    return [Task("run", run)]


def cable_table(samples: Samples) -> Table:
    from tests.benchmarks.local_sgd_cable_ranks import BF16, FP32, LOCAL, POWERSGD, TORCH  # which imports torch

    def compare(over: str, under: str) -> Number:
        return samples.ratio_of("run", f"{over}: seconds", f"{under}: seconds")

    goals = {LOCAL: 2.2, POWERSGD: 1.8, BF16: 1.3}
    rows = []
    for column in samples.values["run"]:
        name, separator, unit = column.rpartition(": ")
        if not separator or unit != "seconds":
            continue
        gain: Cell = "" if name == FP32 else compare(FP32, name)
        milliseconds = samples.number("run", column, 1e3)
        megabytes = samples.number("run", f"{name}: megabytes")
        rows.append(Row(name, [gain, milliseconds, megabytes], goals.get(name)))
    rows.append(Row(f"step time: local SGD / {TORCH}", [compare(LOCAL, TORCH), "", ""], 1.05, at_least=False))
    return Table(("strategy", f"speedup over {FP32}", "ms per step", "MB sent per step"), rows)


PARTS = [
    Part(
        f"{NAME}/accuracy",
        f"test accuracy after one epoch of MNIST, two workers: DDP and local SGD with the same {SEEDS} seeds",
        lambda scratch: [train(scratch, name) for name in SIDES],
        accuracy_table,
        rounds=SEEDS,
        facts=("2 processes with 1 thread each", f"batch size {BATCH}"),
        missing=no_mnist,
    ),
    Part(
        f"{NAME}/cable",
        f"a step of two hosts that cables of {RATE} join: DDP, local SGD and torch's own",
        measure_on_cable,
        cable_table,
        rounds=5,
        facts=(
            "2 processes with 1 thread each",
            "batch size 16",
            f"links limited to {RATE_LABEL}",
        ),
        missing=lambda: hosts.find_obstacle(parse_rate_and_delay(RATE, "")),
    ),
    *local_sgd_crossover.PARTS,
]
FIGURES = local_sgd_crossover.FIGURES
