"""Gains of lower precision and of accumulation.

Precisions: the ConvNet in two processes with one thread each, by precision, microbatches, and when gradients are
exchanged. Exchange: ResNet-18 in two processes, gradients exchanged once in four microbatches or each time, and the
same training written with Accelerate and with Lightning Fabric. Bits: ResNet-50 in one process with two threads, bf16
and channels_last apart and together, beside a large matrix product, which shows what bf16 gains at most on a processor.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.config import config
from common.measure import plots
from common.ranks.rendezvous import World
from configs.amp_accum import Config
from tests.benchmarks.drawing import Figure, heights
from tests.benchmarks.libraries import data_parallel_team, same_first_losses
from tests.benchmarks.measure import Samples, Side, Task, Team, require_same
from tests.benchmarks.parts import QUIET, Part, run_of
from tests.benchmarks.records import Row, Table, at_least, at_most, list_step_times, make_value_table

NAME = "amp_accum"
KEEP = ("samples_per_second", "training_bytes", "bytes_sent")
CELLS = [("1", "true"), ("4", "true"), ("4", "false")]


class GridCell(NamedTuple):
    """Settings of one side of the comparison of precisions."""

    precision: str
    microbatches: str
    no_sync: str

    @property
    def name(self) -> str:
        """The name of the side."""
        exchanged = "once" if self.no_sync == "true" else "after each"
        return f"{self.precision}, {self.microbatches}, {exchanged}"

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings as arguments of a command."""
        return f"precision={self.precision}", f"accumulate={self.microbatches}", f"no_sync={self.no_sync}"


GRID: list[GridCell] = []
for precision in ("fp32", "bf16", "fp16"):
    GRID += [GridCell(precision, *cell) for cell in CELLS]


def precision_sides(scratch: Path) -> list[Task]:
    shared = ("data.name=digits", "batch=64", "steps=40", "launch.threads=1")
    return [run_of(scratch, cell.name, NAME, *shared, *cell.settings, keep=KEEP) for cell in GRID]


def precision_table(samples: Samples) -> Table:
    reference = GRID[0].name
    rows = []
    for cell in GRID:
        rate = samples.number(cell.name, "samples_per_second")
        megabytes = samples.number(cell.name, "training_bytes", 1e-6)
        megabytes_sent = samples.number(cell.name, "bytes_sent", 1e-6)
        loss_difference = samples.difference(cell.name, reference, "last_loss")
        rows.append(Row(cell.name, [rate, megabytes, megabytes_sent, loss_difference]))
    heads = ("samples/s", "memory beyond the model, MB", "MB sent per step", "final loss minus that of the first row")
    return Table(("precision, microbatches, all-reduce", *heads), rows)


# ---- exchanging once a window

IMAGES = ("data.name=generated", "data.samples=640", "data.test_limit=10", "steps=5")
CONSTANT_RATE = ("optim.warmup=0", "optim.decay=constant", "optim.lr=0.01", "optim.base_batch=0")
RESNET = ("model=resnet18", "accumulate=4", "processes_per_node=2", "launch.threads=1", *IMAGES, *CONSTANT_RATE)
SHORT = (*RESNET, "data.image_size=64", "batch=32", "precision=fp32")
LONG = (*RESNET, "batch=128", "precision=bf16")


def exchange_sides(scratch: Path) -> list[Team | Task]:
    cfg = config.load_config(Config, [*QUIET, *LONG])
    return [
        run_of(scratch, "short step, once", NAME, *SHORT),
        run_of(scratch, "short step, after each", NAME, *SHORT, "no_sync=false"),
        run_of(scratch, "once", NAME, *LONG),
        run_of(scratch, "after each", NAME, *LONG, "no_sync=false"),
        data_parallel_team(scratch, cfg, window=4, bf16=True),
    ]


def exchange_table(samples: Samples) -> Table:
    gain = samples.ratio("short step, after each", "short step, once")
    rows = list_step_times(samples)
    rows.append(at_least("ResNet-18, 64 px, batch size 32, fp32: all-reduce after each microbatch / once", gain, 1.3))
    rows.append(
        Row(
            "ResNet-18, 32 px, batch size 128, bf16: all-reduce after each microbatch / once",
            [samples.ratio("after each", "once")],
        )
    )
    rows.append(at_most("this script / Accelerate", samples.ratio("once", "Accelerate"), 1.01))
    rows.append(at_most("this script / Fabric", samples.ratio("once", "Fabric"), 1.01))
    return make_value_table(rows)


# ---- bits

DEEP = ("model=resnet50", "batch=32", "accumulate=1", "processes_per_node=1", "launch.threads=2", *CONSTANT_RATE)
LAYOUTS = {"": "false", ", channels_last": "true"}
GOALS = {64: 2.0, 128: 2.8}


def bit_sides(scratch: Path, pixels: int) -> list[Team | Task]:
    images = (f"data.image_size={pixels}", "data.name=generated", "data.samples=160", "data.test_limit=10", "steps=4")
    sides: list[Team | Task] = []
    for precision in ("fp32", "bf16"):
        for layout, channels_last in LAYOUTS.items():
            settings = (*DEEP, *images, f"precision={precision}", f"channels_last={channels_last}")
            sides.append(run_of(scratch, precision + layout, NAME, *settings))
    return [*sides, Team(1, 2, products)]


def make_product(dtype: torch.dtype) -> Side:
    """A matrix product that is large enough to reach the processor's rate."""
    a = torch.randn(2048, 2048).to(dtype)
    b = torch.randn(2048, 2048).to(dtype)

    def multiply() -> float:
        start = time.perf_counter()
        for _ in range(3):
            a @ b
        return (time.perf_counter() - start) / 3

    return multiply


def products(world: World) -> dict[str, Side]:
    return {"product, fp32": make_product(torch.float32), "product, bf16": make_product(torch.bfloat16)}


def bit_check(scratch: Path, samples: Samples) -> None:
    expected = samples.values["fp32"]["first_loss"]
    for side, columns in samples.values.items():
        if "first_loss" in columns:
            require_same(side, columns["first_loss"], expected, 0.05)


def bit_table(samples: Samples, pixels: int) -> Table:
    rows = [row for row in list_step_times(samples) if "product" not in row.what]
    for side in ("bf16", "fp32, channels_last"):
        rows.append(Row(f"fp32 / {side}", [samples.ratio("fp32", side)]))
    rows.append(at_least("fp32 / bf16, channels_last", samples.ratio("fp32", "bf16, channels_last"), GOALS[pixels]))
    limit = samples.ratio("product, fp32", "product, bf16")
    rows.append(Row("fp32 / bf16, product of two 2048 x 2048 matrices (upper bound on this CPU)", [limit]))
    return make_value_table(rows)


# ---- on a GPU


BOOLEANS = ("false", "true")
GPU_SETTINGS = (
    *("model=resnet50", "accumulate=1", "processes_per_node=1", *CONSTANT_RATE),
    *("batch=256", "data.name=generated", "data.image_size=224"),
    *("data.samples=2560", "data.test_limit=10", "steps=30", "launch.device=cuda"),
)


def card_sides(scratch: Path) -> list[Task]:
    tasks = []
    precisions = ("fp32", "tf32", "bf16", "fp16")
    for precision, (layout, channels_last), compiled in itertools.product(precisions, LAYOUTS.items(), BOOLEANS):
        label = f"{precision}{layout}"
        if compiled == "true":
            label += ", compiled"
        settings = (f"precision={precision}", f"channels_last={channels_last}", f"compile={compiled}")
        keep = ("samples_per_second", "training_bytes")
        tasks.append(run_of(scratch, label, NAME, *GPU_SETTINGS, *settings, keep=keep))
    return tasks


def card_table(samples: Samples) -> Table:
    rows = []
    for side in samples.values:
        rate = samples.number(side, "samples_per_second")
        gigabytes = samples.number(side, "training_bytes", 1e-9)
        rows.append(Row(side, [rate, gigabytes, samples.ratio("fp32", side)]))
    return Table(("precision", "samples/s", "memory beyond the model, GB", "speedup over fp32"), rows)


def no_gpu() -> str:
    """Return why no comparison on a GPU is possible; empty if it is."""
    devices = [f"/dev/nvidia{number}" for number in range(8)]
    return "" if any(map(os.path.exists, devices)) else "no CUDA GPU is here"


def draw_precisions(path: Path, part: Mapping[str, Any]) -> None:
    """Draw the milliseconds of a step of each precision."""
    sides = [side for side in part["samples"] if "product" not in side]
    plots.draw_bar_chart(path, heights(part, sides, 1e3), "ms per step", title="ResNet-50 at 64 pixels by precision")


def make_bit_part(pixels: int) -> Part:
    return Part(
        f"{NAME}/bits_{pixels}",
        f"ResNet-50 at {pixels} px, batch 32, one process",
        lambda scratch: bit_sides(scratch, pixels),
        lambda samples: bit_table(samples, pixels),
        check=bit_check,
        facts=("2 threads", "batch size 32"),
    )


PRECISIONS_PART = Part(
    f"{NAME}/precisions",
    "ConvNet on digits, batch 64, 40 steps: precision, microbatches, and when gradients are exchanged",
    precision_sides,
    precision_table,
    facts=("2 processes with 1 thread each", "batch size 64"),
)
EXCHANGE_PART = Part(
    f"{NAME}/exchange",
    "ResNet-18 in two processes: gradients exchanged once a window, and the libraries",
    exchange_sides,
    exchange_table,
    check=same_first_losses("once", 0.02),
    facts=("2 processes with 1 thread each",),
)
GPU_PART = Part(
    f"{NAME}/gpu",
    "ResNet-50 at 224 px, batch 256, on one GPU",
    card_sides,
    card_table,
    facts=("batch size 256",),
    missing=no_gpu,
)
PARTS = [PRECISIONS_PART, EXCHANGE_PART, *map(make_bit_part, GOALS), GPU_PART]
FIGURES: dict[str, Figure] = {NAME: (f"{NAME}/bits_64", draw_precisions)}
