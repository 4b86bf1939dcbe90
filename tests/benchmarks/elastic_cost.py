"""The cost of elastic=true per step while no rank is lost: its added calls, and the step time beside that without it.

    python -m tests.benchmarks.elastic_cost key=value ...

trains ddp_multinode with these settings and elastic=true, times each added call where it is called, and writes the mean
times of rank 0 beside its metrics. The calls leave out the thread that sends heartbeats and the log of metrics, but the
ratio of the step times includes them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from common.api import start
from common.config.config import ROOT
from common.runs.folder import RunFolder, read_json, write_json
from common.techniques.elastic.recovery import ElasticRecovery
from common.training.run import Run
from configs.ddp_multinode import Config
from experiments import ddp_multinode
from tests.benchmarks.measure import Samples, Task
from tests.benchmarks.parts import Part, discard_run, environment, run_of
from tests.benchmarks.records import Row, Table, at_most, make_value_table

CALLS = {
    "begin_step": "copy buffers and random state",
    "start_averaging": "start the loss all-reduce",
    "commit": "wait for its result",
}
METHODS = {"begin_step": "before_step"}  # methods that have another name than in the records
FILE = "elastic_cost.json"
WARM_UP = 10  # steps
DATA = ("data.name=generated", "data.samples=1280", "data.test_limit=10")
BRIEF = (*DATA, "launch.threads=1", "launch.device=cpu", "log.seconds=60")
LARGE = "resnet18"  # takes 100 ms a step, or more
SIZES = {"mlp": ("model=mlp", "batch=64", "steps=300", "epochs=20"), LARGE: ("model=resnet18", "batch=16", "steps=40")}


def time_method(owner: Any, name: str, durations: list[float]) -> None:
    """Let a method record the seconds of each call."""
    method: Callable[..., Any] = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        start_time = time.perf_counter()
        try:
            return method(*arguments)
        finally:
            durations.append(time.perf_counter() - start_time)

    setattr(owner, name, call)


def main(cfg: Config, run: Run) -> None:
    """Train, and write the mean times."""
    durations: dict[str, list[float]] = {name: [] for name in CALLS}
    for name, times in durations.items():
        time_method(ElasticRecovery, METHODS.get(name, name), times)
    ddp_multinode.main(cfg, run)
    if run.world.is_main:
        means = {name: fmean(times[WARM_UP:]) for name, times in durations.items()}
        write_json(run.folder.attempt_folder / FILE, means | {"seconds": run.compute_step_seconds()})


def run_elastic(scratch: Path, label: str) -> Task:
    """An elastic run with timed calls; its seconds are those of a step."""

    def run(number: int) -> dict[str, float]:
        runs = Path(tempfile.mkdtemp(prefix="run-", dir=scratch))
        settings = [*BRIEF, *SIZES[label], "elastic=true", f"runs={runs}"]
        command = [sys.executable, "-m", "tests.benchmarks.elastic_cost", *settings]
        subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, check=True)
        (path,) = runs.iterdir()
        folder = RunFolder(path)
        means = read_json(folder.list_attempts()[-1].attempt_folder / FILE)
        discard_run(folder)
        added = sum(means[name] for name in CALLS)
        return {**means, "added": added, "percent": 100 * added / means["seconds"]}

    return Task(label, run)


def sides(scratch: Path) -> list[Task]:
    tasks = []
    for label, settings in SIZES.items():
        tasks.append(run_elastic(scratch, label))
        tasks.append(run_of(scratch, f"{label}, not elastic", "ddp_multinode", *BRIEF, *settings))
    return tasks


def table(samples: Samples) -> Table:
    rows = []
    for side in SIZES:
        rows.append(Row(f"{side}: ms per step", [samples.number(side, factor=1e3)]))
        rows += [Row(f"{side}: us to {text}", [samples.number(side, name, 1e6)]) for name, text in CALLS.items()]
        rows.append(at_most(f"{side}: us per step in the added calls", samples.number(side, "added", 1e6), 20))
        bound = 1 if side == LARGE else None
        percent = samples.number(side, "percent")
        rows.append(Row(f"{side}: % of the step time in the added calls", [percent], bound, at_least=False))
        rows.append(Row(f"{side}: step time elastic / not elastic", [samples.ratio(side, f"{side}, not elastic")]))
    return make_value_table(rows)


PART = Part(
    "ddp_multinode/elastic",
    "a step of two ranks with elastic=true and without it, and the calls that elastic=true adds",
    sides,
    table,
    rounds=10,
    drop=1,
    facts=("2 processes with 1 thread each", "batch size 64 (mlp), 16 (resnet18)"),
)

if __name__ == "__main__":
    start(main, Config)
