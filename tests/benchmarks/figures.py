"""The figures of the pages: schedules as they are planned, and steps and comparisons as they were recorded.

make tables                                             draws experiments/figures/*.svg with the tables
python -m tests.benchmarks.figures compare RUN_PAGE     a picture of a page of make compare, by headless chromium
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.config.config import ROOT
from common.measure import plots
from common.techniques.pipeline import report, schedules
from common.techniques.pipeline.schedules import Action, Span
from tests.benchmarks import crossover
from tests.benchmarks.collectives import SIDES

FOLDER = ROOT / "experiments" / "figures"
PLANNED = ("naive", "gpipe", "1f1b")
MARGIN = 120  # pixels of a window that chromium may take for itself: what lies below is not drawn in full
STEP = 1e-3  # seconds of a planned forward
Parts = Mapping[str, Mapping[str, Any]]


def draw_plan(path: Path, name: str, stages: int = 2, microbatches: int = 4) -> None:
    """A schedule with equal stages and messages that take no time."""
    played = schedules.simulate_schedule(schedules.SCHEDULES[name](stages, stages, microbatches), stages)
    lanes = {
        f"stage {stage}": [Span(span.action, span.start * STEP, span.end * STEP) for span in spans]
        for stage, spans in enumerate(played)
    }
    bubble = schedules.compute_bubble(played)
    title = f"{name} as planned: {stages} stages, {microbatches} microbatches, bubble {100 * bubble:.0f} %"
    report.draw_timeline(path, lanes, title)


def draw_step(path: Path, timeline: Sequence[Mapping[str, Any]], title: str) -> None:
    """A recorded step."""
    lanes: dict[str, list[Span]] = {}
    for entry in sorted(timeline, key=lambda entry: (entry["stage"], entry["start"])):
        action = Action(entry["kind"], entry["stage"], entry["microbatch"])
        lanes.setdefault(f"stage {entry['stage']}", []).append(Span(action, entry["start"], entry["end"]))
    report.draw_timeline(path, lanes, title)


def heights(part: Mapping[str, Any], sides: Sequence[str], factor: float) -> dict[str, tuple[float, float]]:
    """The median of each side and half its spread."""
    found = {}
    for side in sides:
        values = [factor * value for value in part["samples"][side]["seconds"]]
        found[textwrap.fill(side, 14)] = statistics.median(values), (max(values) - min(values)) / 2
    return found


def draw_pruning(path: Path, part: Mapping[str, Any]) -> None:
    """Test accuracy of each criterion against the weights that are left."""
    series: dict[str, list[tuple[float, float, float]]] = {}
    for side, found in part["samples"].items():
        values = sorted(100 * value for value in found["test_accuracy"])
        point = values[len(values) // 2], (values[-1] - values[0]) / 2
        criterion, _, level = side.partition(" ")
        if level:
            series.setdefault(criterion, []).append((100 * (1 - float(level)), *point))
        else:
            levels = {"dense": point[0]}
    at = plots.make_axes()
    for label, points in series.items():
        across, means, spread = zip(*sorted(points), strict=True)
        at.errorbar(across, means, spread, marker="o", capsize=3, label=label)
    for label, height in levels.items():
        at.axhline(height, linestyle="--", color="0.35", label=label)
    at.set(xlabel="weights left, %", ylabel="test accuracy, %", title="LeNet-300-100 on MNIST")
    plots.save_with_legend(at, path)


def draw_sizes(path: Path, part: Mapping[str, Any]) -> None:
    """Milliseconds a batch against the microbatch of the pipeline."""
    found = {" ".join(name.split()): pair for name, pair in heights(part, list(part["samples"]), 1e3).items()}
    points = [(float(name.split()[-1]), *found[name]) for name in found if name.startswith("pipelined")]
    levels = {name: found[name][0] for name in ("single", "naive")}
    plots.draw_curves(path, {"pipelined": points}, "samples in a microbatch", "ms a batch", levels, log=True)


def steps_of(part: str, names: Mapping[str, str]) -> dict[str, tuple[str, Callable[[Path, Any], None]]]:
    """Figures of the recorded steps of a part's sides, by the file's name."""

    def one(side: str, words: str) -> Callable[[Path, Any], None]:
        return lambda path, content: draw_step(path, content["timelines"][side], words)

    return {f"{part.replace('/', '_')}_{side.split()[-1]}": (part, one(side, words)) for side, words in names.items()}


def draw_collectives(path: Path, part: Mapping[str, Any]) -> None:
    """Microseconds of an all-reduce against its size, with the fitted lines."""
    medians = {name: statistics.median(values) for name, values in part["samples"]["run"].items()}
    series: dict[str, list[tuple[float, float, float]]] = {}
    for name, seconds in medians.items():
        point, _, side = name.partition(": ")
        if point.startswith("all_reduce, ") and point.endswith(" bytes") and side in SIDES:
            size = float(point.removeprefix("all_reduce, ").removesuffix(" bytes").replace(",", ""))
            series.setdefault(side, []).append((size, 1e6 * seconds, 0.0))
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for side, points in series.items():
        alpha, beta = (medians[f"all_reduce float32 {side}: {part}"] for part in ("alpha", "beta"))
        least, most = points[0][0], points[-1][0]
        across = [least * (most / least) ** (i / 60) for i in range(61)]
        lines[f"{side}, fitted"] = [(n, 1e6 * (alpha + beta * n), 0.0) for n in across]
    plots.draw_curves(path, series, "bytes", "microseconds", computed=lines, loglog=True, title="all-reduce, two ranks")


def draw_crossover(path: Path, part: Mapping[str, Any]) -> None:
    """Milliseconds of a step against the rate of the cable: measured points and the lines of the model."""
    at = plots.make_axes()
    for number, (side, (points, line)) in enumerate(crossover.trace_lines(part).items()):
        across, means, spread = zip(*points, strict=True)
        at.errorbar(across, means, spread, marker="o", linestyle="", capsize=3, color=f"C{number}", label=side)
        at.plot(*zip(*line, strict=True), linestyle="--", color=f"C{number}")
    at.plot([], [], linestyle="--", color="0.35", label="alpha + beta n")
    at.set(xlabel="Mbit/s", ylabel="ms a step", xscale="log", yscale="log", title="the ConvNet on two hosts")
    at.set_xticks(across, [f"{rate:g}" for rate in across])
    plots.save_with_legend(at, path)


def draw_accuracy(path: Path, part: Mapping[str, Any]) -> None:
    """Test accuracy after an epoch against the bytes that a rank sends for it."""
    at = plots.make_axes()
    for side, found in part["samples"].items():
        values = sorted(100 * value for value in found["test_accuracy"])
        sent = statistics.median(found["bytes"]) / 1e6
        at.errorbar(sent, statistics.median(values), (values[-1] - values[0]) / 2, marker="o", capsize=3, label=side)
    at.set(xlabel="MB sent by a rank", ylabel="test accuracy, %", xscale="log", title="one epoch of MNIST, two ranks")
    plots.save_with_legend(at, path)


FIGURES: dict[str, tuple[str, Callable[[Path, Any], None]]] = {
    **steps_of(
        "mnist_pipeline/wide",
        {
            "built-in gpipe": "mnist_pipeline, GPipe, width 1024, a measured step",
            "built-in 1f1b": "mnist_pipeline, 1F1B, width 1024, a measured step",
        },
    ),
    **steps_of(
        "resnet_modelparallel/modes",
        {
            "naive": "ResNet-18 naively split, a measured step",
            "pipelined, 16": "ResNet-18, GPipe, microbatches of 16, a measured step",
        },
    ),
    "resnet_modelparallel_sizes": ("resnet_modelparallel/modes", draw_sizes),
    "resnet_dataparallel": (
        "resnet_dataparallel/strategies",
        lambda path, part: plots.draw_bar_chart(path, heights(part, list(part["samples"]), 1e3), "ms a step"),
    ),
    "ddp_multinode": (
        "ddp_multinode/step",
        lambda path, part: plots.draw_bar_chart(path, heights(part, list(part["samples"]), 1e3), "ms a step"),
    ),
    "amp_accum": (
        "amp_accum/bits_64",
        lambda path, part: plots.draw_bar_chart(
            path, heights(part, [side for side in part["samples"] if "product" not in side], 1e3), "ms a step"
        ),
    ),
    "sparse_prune": ("sparse_prune/criteria", draw_pruning),
    "collectives": ("collectives/sizes", draw_collectives),
    "local_sgd_crossover": ("crossover/rates", draw_crossover),
    "local_sgd_bytes": ("crossover/accuracy", draw_accuracy),
}


def draw(parts: Parts, folder: Path = FOLDER) -> list[Path]:
    """Draw every figure whose part is recorded."""
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")  # the same numbers give the same file
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "figures"
    folder.mkdir(exist_ok=True)
    drawn = []
    for name in PLANNED:
        drawn.append(folder / f"schedule_{name}.svg")
        draw_plan(drawn[-1], name)
    for name, (part, figure) in FIGURES.items():
        if part in parts:
            drawn.append(folder / f"{name}.svg")
            figure(drawn[-1], parts[part])
    return drawn


def photograph(page: Path, to: Path, width: int = 1200, height: int = 870) -> None:
    """A picture of a page as chromium shows it. Raises FileNotFoundError without chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise FileNotFoundError("chromium is missing: apt-get install chromium")
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000"]
    with tempfile.TemporaryDirectory() as home:
        window = f"--window-size={width},{height + MARGIN}"
        command = [chromium, *words, window, f"--user-data-dir={home}"]
        subprocess.run(
            [*command, f"--screenshot={to}", page.resolve().as_uri()], check=True, capture_output=True, timeout=180
        )
    from PIL import Image

    # median cut, the default, gives thin coloured lines to grey
    picture = Image.open(to).convert("RGB").crop((0, 0, width, height))
    picture.quantize(64, Image.Quantize.MAXCOVERAGE).save(to, optimize=True)


if __name__ == "__main__":
    if sys.argv[1:2] != ["compare"] or len(sys.argv) != 3:
        sys.exit((__doc__ or "").strip())
    photograph(Path(sys.argv[2]), FOLDER / "compare.png")
