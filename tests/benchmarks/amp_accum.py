"""What fewer bits and accumulation gain.

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
from typing import Any

import torch

from common.config import config
from common.measure import plots
from common.ranks.rendezvous import World
from configs.amp_accum import Config
from tests.benchmarks.drawing import Figure, heights
from tests.benchmarks.libraries import data_parallel_team, same_first_losses
from tests.benchmarks.measure import Samples, Side, Task, Team, require_same
from tests.benchmarks.parts import QUIET, Part, run_of
from tests.benchmarks.records import Cell, Row, Table, at_least, at_most

NAME = "amp_accum"
KEEP = ("samples_per_second", "training_bytes", "bytes_sent")
CELLS = [("1", "true"), ("4", "true"), ("4", "false")]
GRID = [(precision, *cell) for precision in ("fp32", "bf16", "fp16") for cell in CELLS]


def cell_name(precision: str, microbatches: str, once: str) -> str:
    return f"{precision}, {microbatches}, {'once' if once == 'true' else 'after each'}"


def precision_sides(scratch: Path) -> list[Task]:
    words = ("data.name=digits", "batch=64", "steps=40", "launch.threads=1")
    return [
        run_of(
            scratch,
            cell_name(*cell),
            NAME,
            *words,
            f"precision={cell[0]}",
            f"accumulate={cell[1]}",
            f"no_sync={cell[2]}",
            keep=KEEP,
        )
        for cell in GRID
    ]


def precision_table(taken: Samples) -> Table:
    plain, rows = cell_name(*GRID[0]), []
    for cell in GRID:
        name = cell_name(*cell)
        cells: list[Cell] = [
            taken.number(name, "samples_per_second"),
            taken.number(name, "training_bytes", 1e-6),
            taken.number(name, "bytes_sent", 1e-6),
            taken.difference(name, plain, "last_loss"),
        ]
        rows.append(Row(name, cells))
    heads = ("samples/s", "MB beyond the model", "MB sent a step", "final loss, less that of the first row")
    return Table(("precision, microbatches, exchanged", *heads), rows)


# ---- exchanging once a window

IMAGES = ("data.name=generated", "data.samples=640", "data.test_limit=10", "steps=5")
PLAIN = ("optim.warmup=0", "optim.decay=constant", "optim.lr=0.01", "optim.base_batch=0")
RESNET = ("model=resnet18", "accumulate=4", "processes_per_node=2", "launch.threads=1", *IMAGES, *PLAIN)
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


def exchange_table(taken: Samples) -> Table:
    rows = [Row(f"ms a step: {side}", [taken.number(side, factor=1e3)]) for side in taken.values]
    rows += [
        at_least(
            "ResNet-18, 64 px, batch 32, fp32: exchanged after each microbatch / once",
            taken.ratio("short step, after each", "short step, once"),
            1.3,
        ),
        Row("the same at 32 px, batch 128, bf16", [taken.ratio("after each", "once")]),
        at_most("this script / Accelerate", taken.ratio("once", "Accelerate"), 1.01),
        at_most("this script / Fabric", taken.ratio("once", "Fabric"), 1.01),
    ]
    return Table(("measured", "value"), rows)


# ---- bits

DEEP = ("model=resnet50", "batch=32", "accumulate=1", "processes_per_node=1", "launch.threads=2", *PLAIN)
LAYOUTS = {"": "false", ", channels_last": "true"}
GOALS = {64: 2.0, 128: 2.8}


def bit_sides(scratch: Path, pixels: int) -> list[Team | Task]:
    images = (f"data.image_size={pixels}", "data.name=generated", "data.samples=160", "data.test_limit=10", "steps=4")
    tasks: list[Team | Task] = [
        run_of(scratch, precision + layout, NAME, *DEEP, *images, f"precision={precision}", f"channels_last={word}")
        for precision, (layout, word) in itertools.product(("fp32", "bf16"), LAYOUTS.items())
    ]
    return [*tasks, Team(1, 2, products)]


def products(world: World) -> dict[str, Side]:
    """Matrix products that are large enough to reach the processor's rate."""

    def side(dtype: torch.dtype) -> Side:
        a, b = (torch.randn(2048, 2048).to(dtype) for _ in range(2))

        def turn() -> float:
            start = time.perf_counter()
            for _ in range(3):
                a @ b
            return (time.perf_counter() - start) / 3

        return turn

    return {"product, fp32": side(torch.float32), "product, bf16": side(torch.bfloat16)}


def bit_check(scratch: Path, taken: Samples) -> None:
    for side, found in taken.values.items():
        if "first_loss" in found:
            require_same(side, found["first_loss"], taken.values["fp32"]["first_loss"], 0.05)


def bit_table(taken: Samples, pixels: int) -> Table:
    rows = [
        Row(f"ms a step: {side}", [taken.number(side, factor=1e3)]) for side in taken.values if "product" not in side
    ]
    for side in ("bf16", "fp32, channels_last"):
        rows.append(Row(f"fp32 / {side}", [taken.ratio("fp32", side)]))
    rows.append(at_least("fp32 / bf16, channels_last", taken.ratio("fp32", "bf16, channels_last"), GOALS[pixels]))
    limit = "fp32 / bf16 of a matrix product of 2048 x 2048, the limit of this processor"
    return Table(("measured", "value"), [*rows, Row(limit, [taken.ratio("product, fp32", "product, bf16")])])


# ---- on a GPU

CARD = list(itertools.product(("fp32", "tf32", "bf16", "fp16"), LAYOUTS.items(), ("false", "true")))


def card_sides(scratch: Path) -> list[Task]:
    words = (*DEEP[:1], *DEEP[2:4], *PLAIN, "batch=256", "data.name=generated", "data.image_size=224")
    brief = ("data.samples=2560", "data.test_limit=10", "steps=30", "launch.device=cuda")
    return [
        run_of(
            scratch,
            f"{precision}{layout}{', compiled' * (compiled == 'true')}",
            NAME,
            *words,
            *brief,
            f"precision={precision}",
            f"channels_last={word}",
            f"compile={compiled}",
            keep=("samples_per_second", "training_bytes"),
        )
        for precision, (layout, word), compiled in CARD
    ]


def card_table(taken: Samples) -> Table:
    rows = [
        Row(
            side,
            [
                taken.number(side, "samples_per_second"),
                taken.number(side, "training_bytes", 1e-9),
                taken.ratio("fp32", side),
            ],
        )
        for side in taken.values
    ]
    return Table(("precision", "samples/s", "GB beyond the model", "times as fast as fp32"), rows)


def no_gpu() -> str:
    return "" if any(os.path.exists(f"/dev/nvidia{n}") for n in range(8)) else "no CUDA GPU is here"  # noqa: PTH110


def draw_precisions(path: Path, part: Mapping[str, Any]) -> None:
    """Milliseconds of a step of each precision."""
    sides = [side for side in part["samples"] if "product" not in side]
    plots.draw_bar_chart(path, heights(part, sides, 1e3), "ms a step")


PARTS = [
    Part(
        f"{NAME}/precisions",
        "ConvNet on digits, batch 64, 40 steps: precision, microbatches, and when gradients are exchanged",
        precision_sides,
        precision_table,
        rounds=3,
        facts={"threads": "1 in each of 2 processes", "batch": 64},
    ),
    Part(
        f"{NAME}/exchange",
        "ResNet-18 in two processes: gradients exchanged once a window, and the libraries",
        exchange_sides,
        exchange_table,
        check=same_first_losses("once", 0.02),
        facts={"threads": "1 a process"},
    ),
    *(
        Part(
            f"{NAME}/bits_{pixels}",
            f"ResNet-50 at {pixels} px, batch 32, one process",
            lambda scratch, pixels=pixels: bit_sides(scratch, pixels),  # type: ignore[misc]
            lambda taken, pixels=pixels: bit_table(taken, pixels),  # type: ignore[misc]
            check=bit_check,
            facts={"threads": 2, "batch": 32},
        )
        for pixels in GOALS
    ),
    Part(
        f"{NAME}/gpu",
        "ResNet-50 at 224 px, batch 256, on one GPU",
        card_sides,
        card_table,
        rounds=3,
        facts={"batch": 256},
        missing=no_gpu,
    ),
]
FIGURES: dict[str, Figure] = {NAME: (f"{NAME}/bits_64", draw_precisions)}
