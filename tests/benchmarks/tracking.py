"""The cost of W&B in offline mode: step time, and time outside of training steps, beside a run with W&B disabled.

The time outside of training steps is the wall time until the last process has ended, minus the time of all steps. The
wall time itself varies more with the speed of the steps than with W&B. The sides take turns. Each ratio is of one
round.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from common.runs.result import parse_result
from tests.benchmarks.measure import Number, Samples, Task, summarize_values
from tests.benchmarks.parts import Part, discard_run, environment, finish
from tests.benchmarks.records import Row, Table, at_most, make_value_table
from tests.harness.commands.processes import find_processes

NAME = "mnist_pipeline"
MODES = ("disabled", "offline")
UNSPLIT = ("stages=1", "microbatches=1", "launch.threads=2")
POLL_SECONDS = 0.02


class TrackedRun(NamedTuple):
    """Number of steps and other settings of a run."""

    steps: int
    settings: tuple[str, ...] = ()


RUNS = {
    "1 stage, 2 threads, 3 s": TrackedRun(7_500, UNSPLIT),
    "1 stage, 2 threads, 20 s": TrackedRun(50_000, UNSPLIT),
    "default, 3 s": TrackedRun(3_750),
    "default, 20 s": TrackedRun(25_000),
}


def make_task(scratch: Path, run_name: str, mode: str) -> Task:
    """Make the side that trains one run in one mode of W&B."""

    def run(number: int) -> dict[str, float]:
        tracked = RUNS[run_name]
        settings = ("epochs=1000", f"wandb.mode={mode}", f"steps={tracked.steps}", *tracked.settings)
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


def list_seconds_outside_steps(samples: Samples, run_name: str, mode: str) -> list[float]:
    """Return the seconds of each round that the run spent outside of training steps."""
    side = f"{run_name}, {mode}"
    rounds = zip(samples.list_counted(side, "wall"), samples.list_counted(side), strict=True)
    return [wall - RUNS[run_name].steps * step_seconds for wall, step_seconds in rounds]


def compute_added_seconds(samples: Samples, run_name: str) -> Number:
    """Return the seconds outside of training steps that offline takes more than disabled, round by round."""
    disabled, offline = (list_seconds_outside_steps(samples, run_name, mode) for mode in MODES)
    return summarize_values([seconds - base for base, seconds in zip(disabled, offline, strict=True)])


def tracking_table(samples: Samples) -> Table:
    """Return step times, their ratio, and the additional time outside of training steps of each run."""
    rows = []
    for run_name in RUNS:
        disabled, offline = (f"{run_name}, {mode}" for mode in MODES)
        slowdown = samples.ratio(offline, disabled)
        rows.append(Row(f"ms per step, {disabled}", [samples.number(disabled, factor=1e3)]))
        rows.append(Row(f"ms per step, {offline}", [samples.number(offline, factor=1e3)]))
        rows.append(at_most(f"step time offline / disabled, {run_name}", slowdown, 1.03))
        added = compute_added_seconds(samples, run_name)
        rows.append(at_most(f"additional time outside of training steps, s: {run_name}", added, 2))
    return make_value_table(rows)


PARTS = [
    Part(
        "tracking/offline",
        "mnist_pipeline with W&B offline and disabled: step time, and time outside of training steps",
        tracking_sides,
        tracking_table,
        rounds=7,
        facts=("batch size 64",),
    ),
]
