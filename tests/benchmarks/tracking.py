"""The cost of W&B for a run that is tracked offline: step time and wall time beside the same run with W&B disabled.

Wall time ends with the last process of the run. The sides take turns; each ratio is of one round.
"""

from __future__ import annotations

import time
from pathlib import Path

from common.runs.result import parse_result
from tests.benchmarks.measure import Number, Samples, Task
from tests.benchmarks.parts import Part, discard_run, environment, finish
from tests.benchmarks.records import Row, Table, at_most, make_value_table
from tests.harness.commands.processes import find_processes

NAME = "mnist_pipeline"
MODES = ("disabled", "offline")
UNSPLIT = ("stages=1", "microbatches=1", "launch.threads=2")
RUNS: dict[str, tuple[str, ...]] = {
    "1 stage, 2 threads, 3 s": (*UNSPLIT, "steps=7500"),
    "1 stage, 2 threads, 20 s": (*UNSPLIT, "steps=50000"),
    "default, 3 s": ("steps=3750",),
    "default, 20 s": ("steps=25000",),
}
POLL_SECONDS = 0.02


def make_task(scratch: Path, run_name: str, mode: str) -> Task:
    """Make the side that trains one run in one mode of W&B."""

    def run(number: int) -> dict[str, float]:
        settings = ("epochs=1000", f"wandb.mode={mode}", *RUNS[run_name])
        start = time.perf_counter()
        folder = finish(scratch, run_name, NAME, *settings, env=environment(mode))
        while find_processes(str(folder.path.parent)):
            time.sleep(POLL_SECONDS)
        wall = time.perf_counter() - start
        step_seconds = parse_result(folder.result).flatten_values()["step_seconds"]
        discard_run(folder)
        return {"seconds": step_seconds, "wall": wall}

    return Task(f"{run_name}, {mode}", run)


def tracking_sides(scratch: Path) -> list[Task]:
    """The same runs, disabled and offline in turns."""
    tasks = []
    for run_name in RUNS:
        tasks += [make_task(scratch, run_name, mode) for mode in MODES]
    return tasks


def measure_added_wall(samples: Samples, run_name: str) -> Number:
    """Return the seconds that offline takes more than disabled, round by round."""
    return samples.difference(f"{run_name}, offline", f"{run_name}, disabled", "wall")


def tracking_table(samples: Samples) -> Table:
    """Return step times, their ratio, and the additional wall time of each run."""
    rows = []
    for run_name in RUNS:
        disabled, offline = (f"{run_name}, {mode}" for mode in MODES)
        slowdown = samples.ratio(offline, disabled)
        rows.append(Row(f"ms per step, {disabled}", [samples.number(disabled, factor=1e3)]))
        rows.append(Row(f"ms per step, {offline}", [samples.number(offline, factor=1e3)]))
        rows.append(at_most(f"step time offline / disabled, {run_name}", slowdown, 1.03))
        rows.append(at_most(f"additional wall time, s: {run_name}", measure_added_wall(samples, run_name), 2))
    return make_value_table(rows)


PARTS = [
    Part(
        "tracking/offline",
        "mnist_pipeline with W&B offline and disabled: step time, and wall time until the last process has ended",
        tracking_sides,
        tracking_table,
        rounds=7,
        facts=("batch size 64",),
    ),
]
