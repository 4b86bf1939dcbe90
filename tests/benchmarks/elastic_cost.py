"""The cost of elastic=true per step while no rank is lost: its added calls, each timed where it is called.

    python -m tests.benchmarks.elastic_cost key=value ...

trains ddp_multinode with these settings and elastic=true, and writes the medians of rank 0 beside its metrics.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from common.api import start
from common.config.config import ROOT
from common.runs.folder import RunFolder, read_json, write_json
from common.techniques.elastic.recovery import ElasticRecovery
from common.training.run import Run
from configs.ddp_multinode import Config
from experiments import ddp_multinode
from tests.benchmarks.measure import Samples, Task
from tests.benchmarks.parts import Part, discard_run, environment
from tests.benchmarks.records import Row, Table, at_most, make_value_table

CALLS = {
    "begin_step": "copy buffers and random state",
    "start_averaging": "start the loss all-reduce",
    "commit": "wait for its result",
}
METHODS = {"begin_step": "before_step"}  # methods that have another name than in the records
FILE = "elastic_cost.json"
WARM_UP = 10  # steps
BRIEF = ("data.name=generated", "data.samples=1280", "data.test_limit=10", "launch.threads=1", "log.seconds=60")
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
    """Train, and write the medians."""
    durations: dict[str, list[float]] = {name: [] for name in CALLS}
    for name, times in durations.items():
        time_method(ElasticRecovery, METHODS.get(name, name), times)
    ddp_multinode.main(cfg, run)
    if run.world.is_main:
        medians = {name: median(times[WARM_UP:]) for name, times in durations.items()}
        write_json(run.folder.attempt_folder / FILE, medians | {"step": run.compute_step_seconds()})


def run_elastic(scratch: Path, label: str) -> Task:
    """A run with timed calls; its seconds are those that the calls add to a step."""

    def run(number: int) -> dict[str, float]:
        runs = Path(tempfile.mkdtemp(prefix="run-", dir=scratch))
        settings = [*BRIEF, *SIZES[label], "elastic=true", "launch.device=cpu", f"runs={runs}"]
        command = [sys.executable, "-m", "tests.benchmarks.elastic_cost", *settings]
        subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, check=True)
        (path,) = runs.iterdir()
        folder = RunFolder(path)
        medians = read_json(folder.list_attempts()[-1].attempt_folder / FILE)
        discard_run(folder)
        added = sum(medians[name] for name in CALLS)
        return {**medians, "seconds": added, "percent": 100 * added / medians["step"]}

    return Task(label, run)


def sides(scratch: Path) -> list[Task]:
    return [run_elastic(scratch, label) for label in SIZES]


def table(samples: Samples) -> Table:
    rows = []
    for side in samples.values:
        rows.append(Row(f"{side}: ms per step", [samples.number(side, "step", 1e3)]))
        rows += [Row(f"{side}: us to {text}", [samples.number(side, name, 1e6)]) for name, text in CALLS.items()]
        rows.append(at_most(f"{side}: us added per step", samples.number(side, factor=1e6), 20))
        bound = 1 if side == LARGE else None
        rows.append(Row(f"{side}: % added per step", [samples.number(side, "percent")], bound, at_least=False))
    return make_value_table(rows)


PART = Part(
    "ddp_multinode/elastic",
    "what elastic=true adds to a step of two ranks",
    sides,
    table,
    drop=1,
    facts=("2 processes with 1 thread each", "batch size 64 (mlp), 16 (resnet18)"),
)

if __name__ == "__main__":
    start(main, Config)
