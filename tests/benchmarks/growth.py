"""Growth of times with the number of runs, metric rows, files, hosts and ranks.

The exponent of growth compares the two largest sizes. Doubling the size multiplies the time by 2 to the power of the
exponent: with 1, the time is proportional to the size, and with 0, it does not depend on the size.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from common.config.config import ROOT
from common.data import prepare
from common.runs.folder import RunFolder
from common.runs.result import parse_result
from common.system.text import format_count
from configs.shared import Data
from slurm.local_cluster.cables import Shape
from tests.benchmarks import hosts
from tests.benchmarks.measure import Number, Samples, Task, summarize_values
from tests.benchmarks.parts import Part, discard_run, environment, flatten
from tests.benchmarks.records import Cell, Row, Table
from tests.benchmarks.runs import copy_runs, measure_reading, write_long_runs
from tests.benchmarks.tools import measure_first_row
from tests.harness.runs.random_stops import write_image_folder

RUN_COUNTS = (10, 100, 1000, 10_000)
ROW_COUNTS = (1000, 10_000, 100_000, 1_000_000)
LONG_RUNS = 10
FILE_COUNTS = (1000, 10_000, 100_000)
HOST_COUNTS = (2, 4, 8, 16, 32)
RANK_COUNTS = (1, 2, 4, 8, 16)
MAX_EXPONENT = 1.1
STATUS = ("slurm", "status", "--all=1")
RANK_SETTINGS = ("model=mlp", "batch=64", "data.name=digits", "data.test_limit=64", "launch.threads=1", "steps=60")


@dataclasses.dataclass(frozen=True)
class Column:
    """A number that is measured for each size."""

    head: str
    name: str
    factor: float = 1.0


def compute_exponent(samples: Samples, sizes: Sequence[int], column: Column) -> Number:
    """Return the exponent of growth between the two largest sizes, round by round."""
    smaller, larger = sizes[-2:]
    numbers_of_larger = samples.list_counted(f"{larger}", column.name)
    numbers_of_smaller = samples.list_counted(f"{smaller}", column.name)
    pairs = zip(numbers_of_larger, numbers_of_smaller, strict=True)
    return summarize_values([math.log(a / b) / math.log(larger / smaller) for a, b in pairs])


def make_growth_table(
    samples: Samples, noun: str, sizes: Sequence[int], columns: Sequence[Column], bound: float | None = MAX_EXPONENT
) -> Table:
    """Return a table with a row per size, and a row of exponents, of which the first one may have a goal."""
    rows = []
    for size in sizes:
        cells: list[Cell] = [samples.number(f"{size}", column.name, column.factor) for column in columns]
        rows.append(Row(format_count(size, noun), cells))
    exponents = [compute_exponent(samples, sizes, column) for column in columns]
    label = f"exponent of growth, {sizes[-2]:,} to {format_count(sizes[-1], noun)}"
    rows.append(Row(label, exponents, bound, at_least=False))
    return Table((f"number of {noun}s", *(column.head for column in columns)), rows)


def make_tasks(sizes: Sequence[int], measure: Callable[[int], dict[str, float]]) -> list[Task]:
    """Return a side per size."""
    return [Task(f"{size}", functools.partial(measure_size, measure, size)) for size in sizes]


def measure_size(measure: Callable[[int], dict[str, float]], size: int, number: int) -> dict[str, float]:
    """Call a function with a size in each round."""
    return measure(size)


# ---- run folders


RUN_COLUMNS = (
    Column("make status ALL=1, later calls, s", "seconds"),
    Column("first call, s", "first"),
    Column("make status, s", "newest"),
    Column("make compare, s", "compare"),
)


def run_sides(scratch: Path) -> list[Task]:
    for count in RUN_COUNTS:
        copy_runs(scratch / f"{count}", count)
    time.sleep(3)  # the status of runs that have just changed is not stored

    def measure(count: int) -> dict[str, float]:
        runs = scratch / f"{count}"
        for stored in runs.glob(".status.json"):
            stored.unlink()
        first = measure_reading(runs, STATUS)["seconds"]
        again = measure_reading(runs, STATUS)["seconds"]
        newest = measure_reading(runs, ("slurm", "status"))["seconds"]
        compare = measure_reading(runs, ("slurm", "compare"))["seconds"]
        return {"seconds": again, "first": first, "newest": newest, "compare": compare}

    return make_tasks(RUN_COUNTS, measure)


# ---- metric rows


ROW_COLUMNS = (Column("make compare, s", "seconds"), Column("peak memory, MB", "bytes", 1e-6))


def row_sides(scratch: Path) -> list[Task]:
    for count in ROW_COUNTS:
        write_long_runs(scratch / f"{count}", LONG_RUNS, count)
    return make_tasks(ROW_COUNTS, lambda count: measure_reading(scratch / f"{count}", ("slurm", "compare")))


# ---- files of an image folder


FILE_COLUMNS = (Column("first run, s", "seconds"), Column("later runs, s", "again"))


def file_sides(scratch: Path) -> list[Task]:
    for count in FILE_COUNTS:
        write_image_folder(scratch / f"{count}", count)

    def measure(count: int) -> dict[str, float]:
        cache = Path(tempfile.mkdtemp(dir=scratch))
        data = Data(name="imagefolder", root=str(scratch / f"{count}"), cache=str(cache), image_size=32)
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            prepare.prepare_dataset(data)
            seconds.append(time.perf_counter() - start)
        shutil.rmtree(cache)
        return {"seconds": seconds[0], "again": seconds[1]}

    return make_tasks(FILE_COUNTS, measure)


# ---- hosts of a local cluster


HOST_COLUMNS = (Column("make cluster-up, s", "seconds"), Column("srun hostname on all hosts, s", "srun"))


def host_sides(scratch: Path) -> list[Task]:
    def measure(count: int) -> dict[str, float]:
        start = time.perf_counter()
        with hosts.local_cluster(scratch, count) as cluster:
            up = time.perf_counter()
            command = [sys.executable, "-m", "slurm", "cluster", "exec", "srun", f"--nodes={count}", "hostname"]
            subprocess.run(command, cwd=ROOT, env=dict(cluster.env), stdout=subprocess.DEVNULL, check=True)
            # The kernel creates the virtual network in its own threads, which look like other programs.
            return {"seconds": up - start, "srun": time.perf_counter() - up, "others": 0.0}

    return make_tasks(HOST_COUNTS, measure)


# ---- ranks of one host


RANK_COLUMNS = (
    Column("ms per step", "seconds", 1e3),
    Column("memory of all ranks, MB", "bytes", 1e-6),
    Column("command to first step, s", "start"),
)


def rank_sides(scratch: Path) -> list[Task]:
    def measure(count: int) -> dict[str, float]:
        runs = Path(tempfile.mkdtemp(dir=scratch))
        arguments = [*RANK_SETTINGS, f"processes_per_node={count}", f"runs={runs}"]
        start = measure_first_row(runs, [sys.executable, "experiments/ddp_multinode.py", *arguments], environment())
        (path,) = (path.parent for path in runs.glob("*/result.json"))
        result = parse_result(RunFolder(path).result)
        discard_run(RunFolder(path))
        memory = sum(flatten("memory", result.memory).values())
        return {"seconds": result.timings["step_seconds"], "bytes": memory, "start": start}

    return make_tasks(RANK_COUNTS, measure)


PARTS = [
    Part(
        "growth/runs",
        "commands that read many runs of 100 steps",
        run_sides,
        lambda samples: make_growth_table(samples, "run", RUN_COUNTS, RUN_COLUMNS),
    ),
    Part(
        "growth/rows",
        f"make compare of {LONG_RUNS} long runs",
        row_sides,
        lambda samples: make_growth_table(samples, "row", ROW_COUNTS, ROW_COLUMNS),
        facts=(f"{LONG_RUNS} runs",),
    ),
    Part(
        "growth/files",
        "preparing a folder of images",
        file_sides,
        lambda samples: make_growth_table(samples, "file", FILE_COUNTS, FILE_COLUMNS),
        facts=("images of 32 x 32 pixels",),
    ),
    Part(
        "growth/hosts",
        "a local cluster with many hosts",
        host_sides,
        lambda samples: make_growth_table(samples, "host", HOST_COUNTS, HOST_COLUMNS, None),
        facts=("load from other programs not recorded",),
        missing=lambda: hosts.find_obstacle(Shape()),
    ),
    Part(
        "growth/ranks",
        "DDP with more ranks than cores",
        rank_sides,
        lambda samples: make_growth_table(samples, "rank", RANK_COUNTS, RANK_COLUMNS, None),
        facts=("1 thread per process", "batch size 64"),
    ),
]
