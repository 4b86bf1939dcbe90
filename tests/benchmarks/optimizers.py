"""Large batches: test accuracy of SGD with Nesterov momentum and of LARS, tuned with equal budgets.

Each optimizer tries as many learning rates for each batch, a factor of three apart, on one seed a round; the rate of
the lowest training loss in the last epoch is chosen, and the test set is not looked at before. Both follow the linear
scaling rule with a warm-up (Goyal et al. 2017, arXiv 1706.02677). No winner is required: Nado et al. 2021 (arXiv
2102.06356) found tuned Nesterov momentum as good as LARS.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

from common.system.causes import Cause
from configs.data_rules import TRAIN_SAMPLES
from tests.benchmarks.measure import Samples, Task
from tests.benchmarks.mnist_pipeline import no_mnist
from tests.benchmarks.parts import Part, RunFailedError, discard_run, finish, ignore_other_programs
from tests.benchmarks.records import Cell, Row, Table

NAME = "optimizers"
EXPERIMENT = "ddp_multinode"
EPOCHS = 5
BATCHES = (64, 512, 2048, 8192)
BASE = 64
SETTINGS = (
    *("model=mlp", "processes_per_node=1", "launch.threads=1", "data.fallback=none", "data.test_limit=0"),
    *("checkpoint.every_steps=0", f"epochs={EPOCHS}", f"optim.base_batch={BASE}", "optim.decay=cosine"),
)
SGD = "SGD, Nesterov"
LARS = "LARS"
OPTIMIZERS = {SGD: ("optim.name=sgd",), LARS: ("optim.name=lars", "optim.trust=0.02")}
RATES = {SGD: (0.1, 0.033, 0.011, 0.0037, 0.0012, 0.0004), LARS: (0.3, 0.1, 0.033, 0.011, 0.0037, 0.0012)}  # at BASE
PARALLEL_RUNS = min(len(os.sched_getaffinity(0)), len(RATES[SGD]))
DIVERGED: dict[str, float] = {"loss": math.inf}


def count_steps(batch: int) -> int:
    """Return the steps of a run; the last partial batch of an epoch is left out."""
    return EPOCHS * (TRAIN_SAMPLES["mnist"] // batch)


def try_rate(scratch: Path, label: str, rate: float, *settings: str) -> dict[str, float]:
    """Train once; return the mean loss of the last epoch, the test accuracy and the rate, or an infinite loss alone."""
    try:
        folder = finish(scratch, label, EXPERIMENT, *settings, f"optim.lr={rate}")
    except RunFailedError as error:
        if error.cause is not Cause.DIVERGED:
            raise
        return DIVERGED
    losses = [row["loss"] for row in folder.read_metrics() if row.get("loss") is not None]
    epoch_steps = max(1, len(losses) // EPOCHS)
    accuracy = folder.result["scores"]["test_accuracy"]
    discard_run(folder)
    return {"loss": mean(losses[-epoch_steps:]), "rate": rate, "test_accuracy": accuracy}


def choose_best(trials: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the trial of the lowest loss. Raises RuntimeError if all diverged."""
    best = min(trials, key=lambda trial: trial["loss"])
    if best == DIVERGED:
        raise RuntimeError(f"all of {len(trials)} learning rates diverged")
    return best


def tune(scratch: Path, optimizer: str, batch: int, rates: Sequence[float], settings: Sequence[str] = ()) -> Task:
    """A side that tries all rates, as many at a time as there are cores, and keeps the numbers of the best one."""
    label = f"{optimizer}, {batch}"
    warmup = count_steps(batch) // 10
    trial_settings = [*SETTINGS, *OPTIMIZERS[optimizer], f"batch={batch}", f"optim.warmup={warmup}", *settings]

    def run(number: int) -> dict[str, float]:
        start = time.perf_counter()

        def try_rate_of_round(rate: float) -> dict[str, float]:
            return try_rate(scratch, label, rate, *trial_settings, f"seed={number}")

        with ThreadPoolExecutor(PARALLEL_RUNS) as pool:
            trials = list(pool.map(try_rate_of_round, rates))
        return {"seconds": time.perf_counter() - start, **choose_best(trials)}

    return ignore_other_programs(Task(label, run))


def sides(scratch: Path) -> list[Task]:
    tasks = []
    for batch in BATCHES:
        tasks += [tune(scratch, optimizer, batch, RATES[optimizer]) for optimizer in OPTIMIZERS]
    return tasks


def table(samples: Samples) -> Table:
    rows = []
    for batch in BATCHES:
        sgd = f"{SGD}, {batch}"
        lars = f"{LARS}, {batch}"
        cells: list[Cell] = [
            samples.number(sgd, "test_accuracy", 100),
            samples.number(lars, "test_accuracy", 100),
            samples.difference(lars, sgd, "test_accuracy", 100),
            f"{count_steps(batch):,}",
            samples.number(sgd, "rate", batch / BASE),
            samples.number(lars, "rate", batch / BASE),
        ]
        rows.append(Row(f"{batch:,}", cells))
    columns = ("SGD: test accuracy, %", "LARS: test accuracy, %", "LARS - SGD, percentage points", "steps")
    return Table(("batch size", *columns, "SGD: learning rate", "LARS: learning rate"), rows)


PARTS = [
    Part(
        f"{NAME}/large_batch",
        f"a multilayer perceptron on MNIST, {EPOCHS} epochs, by batch: the best of {len(RATES[SGD])} learning rates",
        sides,
        table,
        facts=(f"{PARALLEL_RUNS} runs at a time with 1 thread each", f"best of {len(RATES[SGD])} learning rates"),
        missing=no_mnist,
    )
]
