"""Gains of lower precision and of accumulation.

Precisions: the ConvNet in two processes with one thread each, by precision, microbatches, and when gradients are
exchanged. Exchange: ResNet-18 in two processes, gradients exchanged once in four microbatches or each time, and the
same training written with Accelerate and with Lightning Fabric. Bits: ResNet-50 in one process with two threads, bf16
and channels_last apart and together, beside a large matrix product, which shows what bf16 gains at most on a processor.
GPU: steps of ResNet-50 on one GPU in each precision.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from common.config import config
from common.measure import plots
from common.measure.memory import MemoryMeter
from common.ranks.rendezvous import World
from common.training.optimizers import build_optimizer
from configs.amp_accum import Config
from experiments import amp_accum
from tests.benchmarks.drawing import Figure, heights
from tests.benchmarks.libraries import data_parallel_team, same_first_losses
from tests.benchmarks.measure import Samples, Side, Task, Team, Values, require_same, summarize_values
from tests.benchmarks.parts import QUIET, Part, run_of
from tests.benchmarks.records import Row, Table, at_least, at_most, list_step_times, make_value_table
from tests.harness.settings_text import split_settings

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
    shared = ("data.name=digits", "batch=64", "steps=20", "launch.threads=1")
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

IMAGES = split_settings("data.name=generated data.samples=640 data.test_limit=10 steps=5")
CONSTANT_RATE = split_settings("optim.warmup=0 optim.decay=constant optim.lr=0.01 optim.base_batch=0")
RESNET = ("model=resnet18", "accumulate=4", "processes_per_node=2", "launch.threads=1", *IMAGES, *CONSTANT_RATE)
FP32 = (*RESNET, "data.image_size=64", "batch=32", "precision=fp32")
BF16 = (*RESNET, "data.image_size=32", "batch=128", "precision=bf16")
EXCHANGE_GOALS = {"fp32": 1.3, "bf16": 1.2}


def exchange_sides(scratch: Path) -> list[Team | Task]:
    cfg = config.load_config(Config, [*QUIET, *BF16])
    return [
        run_of(scratch, "fp32, once", NAME, *FP32),
        run_of(scratch, "fp32, after each", NAME, *FP32, "no_sync=false"),
        run_of(scratch, "bf16, once", NAME, *BF16),
        run_of(scratch, "bf16, after each", NAME, *BF16, "no_sync=false"),
        data_parallel_team(scratch, cfg, window=4, bf16=True),
    ]


def exchange_table(samples: Samples) -> Table:
    rows = list_step_times(samples)
    for precision, goal in EXCHANGE_GOALS.items():
        gain = samples.ratio(f"{precision}, after each", f"{precision}, once")
        rows.append(at_least(f"{precision}: after each / once", gain, goal))
    for library in ("Accelerate", "Fabric"):
        rows.append(at_most(f"bf16, once: this script / {library}", samples.ratio("bf16, once", library), 1.01))
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


GPU_BATCH = 128
GPU_STEPS = 5
GPU_IMAGES = (f"batch={GPU_BATCH}", "data.name=generated", "data.image_size=224", "data.classes=1000")
GPU_SETTINGS = ("model=resnet50", "accumulate=1", "processes_per_node=1", *CONSTANT_RATE, *GPU_IMAGES)
CHANNELS_LAST = "channels_last=true"
GPU_SIDES = {
    "fp32": ("precision=fp32",),
    "fp32, channels_last": ("precision=fp32", CHANNELS_LAST),
    "tf32": ("precision=tf32",),
    "tf32, channels_last": ("precision=tf32", CHANNELS_LAST),
    "bf16": ("precision=bf16",),
    "bf16, channels_last": ("precision=bf16", CHANNELS_LAST),
    "bf16, channels_last, compiled": ("precision=bf16", CHANNELS_LAST, "compile=true"),
    "fp16": ("precision=fp16",),
    "fp16, channels_last": ("precision=fp16", CHANNELS_LAST),
}


def make_gpu_sides(world: World) -> dict[str, Callable[[], Values]]:
    """Return a few steps of the experiment in each precision. All sides train on the same batch of random images."""
    generator = torch.Generator(world.device).manual_seed(0)
    images = torch.randn(GPU_BATCH, 3, 224, 224, device=world.device, generator=generator)
    labels = torch.randint(1000, (GPU_BATCH,), device=world.device, generator=generator)
    return {name: make_gpu_side(world, settings, images, labels) for name, settings in GPU_SIDES.items()}


def make_gpu_side(
    world: World, settings: tuple[str, ...], images: torch.Tensor, labels: torch.Tensor
) -> Callable[[], Values]:
    """Return a function that trains for GPU_STEPS steps with the functions of the experiment."""
    cfg = config.load_config(Config, [*QUIET, *GPU_SETTINGS, *settings], {})
    run: Any = SimpleNamespace(device=world.device, dtype=torch.float32, sample_shape=(3, 224, 224), outputs=1000)
    run.loss = F.cross_entropy
    run.world = world
    step: Any = SimpleNamespace(batch=[(images, labels)], mean_shard=GPU_BATCH)
    step.log = lambda **_: None
    step.mark_backward = lambda: None
    step.clip_gradients = lambda *_: None
    amp_accum.set_float32_precision(cfg, run)
    torch.manual_seed(0)
    model = amp_accum.wrap_model(cfg, amp_accum.build_model(cfg, run), run)
    optimizer = build_optimizer(model.parameters(), cfg.optim, scaled=cfg.precision == "fp16")
    scaler = amp_accum.make_scaler(cfg, world.device)

    def train() -> Values:
        amp_accum.set_float32_precision(cfg, run)  # a setting of the process, which all sides share
        optimizer.zero_grad()
        footprint = MemoryMeter(world.device)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(GPU_STEPS):
            optimizer.zero_grad()
            amp_accum.accumulate_gradients(cfg, run, model, scaler, step, footprint)
            amp_accum.update_weights(cfg, model, optimizer, scaler, step)
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / GPU_STEPS
        return {"seconds": seconds, "training_bytes": footprint.peak_bytes}

    return train


def gpu_table(samples: Samples) -> Table:
    rows = []
    for side in samples.values:
        milliseconds = samples.number(side, factor=1e3)
        rate = summarize_values([GPU_BATCH / seconds for seconds in samples.list_counted(side)])
        gigabytes = samples.number(side, "training_bytes", 1e-9)
        rows.append(Row(side, [milliseconds, rate, gigabytes, samples.ratio("fp32", side)]))
    heads = ("ms per step", "samples/s", "memory beyond the model, GB", "speedup over fp32")
    return Table(("precision", *heads), rows)


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
        facts=("one process with 2 threads", "batch size 32"),
    )


PRECISIONS_PART = Part(
    f"{NAME}/precisions",
    "ConvNet on digits, batch 64, 20 steps: precision, microbatches, and when gradients are exchanged",
    precision_sides,
    precision_table,
    facts=("2 processes with 1 thread each", "batch size 64"),
)
EXCHANGE_PART = Part(
    f"{NAME}/exchange",
    "ResNet-18 in two processes: gradients exchanged once a window, and the libraries",
    exchange_sides,
    exchange_table,
    check=same_first_losses("bf16, once", 0.02),
    facts=("2 processes with 1 thread each",),
)
GPU_PART = Part(
    f"{NAME}/gpu",
    f"ResNet-50 at 224 px, batch {GPU_BATCH}, on one GPU",
    lambda scratch: [Team(1, 1, make_gpu_sides, device="cuda")],
    gpu_table,
    drop=1,
    facts=(f"batch size {GPU_BATCH}",),
    missing=no_gpu,
)
PARTS = [PRECISIONS_PART, EXCHANGE_PART, *map(make_bit_part, GOALS), GPU_PART]
FIGURES: dict[str, Figure] = {NAME: (f"{NAME}/bits_64", draw_precisions)}
