"""Gains of a pipeline of a ResNet over the naive split and over one process.

Modes: ResNet-18 at 32 px unsplit, naively split, and as a pipeline with microbatches of several sizes. Split: ResNet-50
at 64 px with channels_last in two stages of one thread each, partitioned by measured cost and as the well-known
tutorial does (behind layer2). The bound is the time of two equal stages whose messages take no time: half of what one
thread needs for the same microbatches, times (M + 1) / M.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.measure import plots
from tests.benchmarks import strategies
from tests.benchmarks.drawing import Figure, heights, steps_of
from tests.benchmarks.measure import Samples, Task, require_same
from tests.benchmarks.parts import Part, run_of, timelines
from tests.benchmarks.records import Cell, Row, Table, at_least, list_step_times, make_value_table
from tests.harness.settings_text import split_settings

NAME = "resnet_modelparallel"
KEEP = ("idle_share", "ideal_bubble", "memory")
STEPS = 5
MODES = {
    "single": ("mode=single",),
    "naive": ("mode=naive",),
    **{f"pipelined, {size}": ("mode=pipelined", f"split_size={size}") for size in (4, 8, 16, 32)},
}


def mode_sides(scratch: Path) -> list[Task]:
    shared = ("batch=64", f"steps={STEPS}", f"data.samples={64 * STEPS}", "data.test_limit=10", "plot=false")
    tasks = []
    for mode, settings in MODES.items():
        threads = 2 if mode == "single" else 1
        tasks.append(run_of(scratch, mode, NAME, *shared, *settings, f"launch.threads={threads}", keep=KEEP))
    return tasks


def list_stage_cells(samples: Samples, mode: str, name: str, factor: float) -> list[Cell]:
    """Return a value for each of two stages, or a dash if a mode has not measured it for a stage."""
    cells: list[Cell] = []
    for stage in range(2):
        column = f"{name}_{stage}"
        cells.append(samples.number(mode, column, factor) if column in samples.values[mode] else "-")
    return cells


def mode_table(samples: Samples) -> Table:
    rows = []
    for mode, columns in samples.values.items():
        idle_shares = list_stage_cells(samples, mode, "idle_share", 100)
        memories = list_stage_cells(samples, mode, "memory", 2**-20)
        ideal = f"{100 * columns['ideal_bubble'][0]:.3g}"
        rows.append(Row(mode, [samples.number(mode, factor=1e3), ideal, *idle_shares, *memories]))
    heads = (
        "ideal bubble, %",
        "idle time of stage 0, %",
        "idle time of stage 1, %",
        "peak memory of stage 0, MiB",
        "peak memory of stage 1, MiB",
    )
    return Table(("mode, microbatch size", "ms per step", *heads), rows)


PIECES = 4  # microbatches
DEEP = split_settings(
    "model=resnet50 channels_last=true batch=64 data.name=generated data.image_size=64 data.samples=320 "
    "data.test_limit=10 optim.decay=constant plot=false steps=5"
)
SPLIT = {
    "naive": ("mode=naive",),
    "gpipe": ("mode=pipelined", "schedule=gpipe"),
    "1f1b": ("mode=pipelined", "schedule=1f1b"),
    "gpipe, split after layer2": ("mode=pipelined", "schedule=gpipe", "split=[layer3_0]"),
    "unsplit": ("mode=single",),
    "gradient accumulation": ("mode=single", f"split_size={64 // PIECES}"),
}


def deep_sides(scratch: Path) -> list[Task]:
    tasks = []
    for name, settings in SPLIT.items():
        tasks.append(run_of(scratch, name, NAME, *DEEP, *settings, "launch.threads=1", keep=("idle_share",)))
    tasks.append(run_of(scratch, "unsplit, 2 threads", NAME, *DEEP, *SPLIT["unsplit"], "launch.threads=2"))
    return tasks


def deep_check(scratch: Path, samples: Samples) -> None:
    references = {
        "naive": "unsplit",
        "gpipe": "gradient accumulation",
        "1f1b": "gradient accumulation",
        "gpipe, split after layer2": "gradient accumulation",
    }
    for name, reference in references.items():
        losses = samples.values[name]["first_loss"]
        require_same(name, losses, samples.values[reference]["first_loss"], 1e-3)


def deep_table(samples: Samples) -> Table:
    """Return step times and ratios of them. Ratios that are similar for GPipe and 1F1B are shown for one of the two."""
    ideal = (PIECES + 1) / PIECES / 2  # time of two equal stages, as a fraction of the time of gradient accumulation
    split_gain = samples.ratio("gpipe, split after layer2", "gpipe")
    rows = [row for row in list_step_times(samples) if "split after" not in row.what]
    rows += [
        at_least("naive / GPipe", samples.ratio("naive", "gpipe"), 1.45),
        at_least("bound / GPipe", samples.ratio("gradient accumulation", "gpipe", ideal), 0.95),
        at_least("bound / 1F1B", samples.ratio("gradient accumulation", "1f1b", ideal), 0.95),
        Row("unsplit with 1 thread / 1F1B", [samples.ratio("unsplit", "1f1b")]),
        Row("unsplit with 2 threads / 1F1B", [samples.ratio("unsplit, 2 threads", "1f1b")]),
        at_least("GPipe: split after layer2 / split by measured time", split_gain, 1.12),
    ]
    return make_value_table(rows)


def draw_sizes(path: Path, part: Mapping[str, Any]) -> None:
    """Draw the milliseconds a batch against the microbatch of the pipeline."""
    points = []
    levels = {}
    for label, (milliseconds, half_spread) in heights(part, list(part["samples"]), 1e3).items():
        name = " ".join(label.split())
        if name.startswith("pipelined"):
            size = float(name.split()[-1])
            points.append((size, milliseconds, half_spread))
        elif name in ("single", "naive"):
            levels[name] = milliseconds
    curves = {"pipelined": points}
    title = "ResNet-18 in two stages"
    plots.draw_curves(path, curves, "samples in a microbatch", "ms per batch", levels, log=True, title=title)


PARTS = [
    Part(
        f"{NAME}/modes",
        "ResNet-18, 32 px, batch 64: unsplit with 2 threads, naive and pipelined in two stages with 1 thread each",
        mode_sides,
        mode_table,
        facts=("2 threads in total", "batch size 64"),
        attachments=timelines("naive", "pipelined, 16"),
    ),
    Part(
        f"{NAME}/split",
        f"ResNet-50, 64 px, batch 64, {PIECES} microbatches, two stages with 1 thread each",
        deep_sides,
        deep_table,
        check=deep_check,
        facts=("1 thread per stage unless the table states otherwise", "batch size 64"),
        attachments=timelines("naive", "gpipe", "1f1b"),
    ),
    strategies.make_part(NAME),
]
FIGURES: dict[str, Figure] = {
    **steps_of(
        f"{NAME}/modes",
        {
            "naive": "ResNet-18 naively split, a measured step",
            "pipelined, 16": "ResNet-18, GPipe, microbatches of 16, a measured step",
        },
    ),
    f"{NAME}_sizes": (f"{NAME}/modes", draw_sizes),
    **strategies.make_figures(NAME),
}
