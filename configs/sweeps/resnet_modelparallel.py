"""Sweep of resnet_modelparallel: single mode, naive mode, and pipelined mode with several microbatch sizes."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import Any, Literal

from configs.resnet_modelparallel import Config
from configs.sweeps import Average, Curves, PointSettings, RunRow, Summary, SweepGrid, average_rows

DEFAULT_STEPS = 12  # number of steps per run
MODES: tuple[Literal["single", "naive", "pipelined"], ...] = ("single", "naive", "pipelined")


def list_points(cfg: Config, gpus: int) -> list[PointSettings]:
    """Return points for single and naive mode, and one point per microbatch size for pipelined mode.

    In single and naive mode, a microbatch is the whole batch. If `steps` is not set, runs are short, because the sweep
    measures only the cost of a step. All runs use the same type of device.
    """
    common: PointSettings = {}
    if not cfg.steps:
        common = {"steps": DEFAULT_STEPS, "data.test_limit": cfg.data.test_limit or cfg.eval_batch}
    if cfg.launch.device == "auto" and gpus and not has_enough_gpus(cfg, gpus):
        common["launch.device"] = "cpu"
    points: list[PointSettings] = [{"mode": mode, "split_size": cfg.batch_plan.shard} for mode in ("single", "naive")]
    points += [{"mode": "pipelined", "split_size": int(size)} for size in cfg.split_sizes]
    return [point | common for point in points]


def has_enough_gpus(cfg: Config, gpus: int) -> bool:
    """Return whether there are enough GPUs for the ranks of every mode."""
    if cfg.launch.excludes_gpus or "cpu" in cfg.devices:
        gpus = 0
    for mode in MODES:
        mode_cfg = replace(cfg, mode=mode).adapt_to_gpus(gpus)
        if mode_cfg.processes > gpus:
            return False
    return True


def summarize_runs(cfg: Config, gpus: int, rows: list[RunRow]) -> Summary:
    """Report the time per batch for each microbatch size, and the idle share and memory of each stage."""
    times = average_rows(rows, ("mode", "split_size"), "step_seconds")
    lines = ["mode       split size    ms per batch   bubble  idle share and peak MiB of each stage's rank"]
    for (mode, size), seconds in times.items():
        repeats = [row for row in rows if (row["cell"]["mode"], row["cell"]["split_size"]) == (mode, size)]
        idle = ""  # one column per rank, averaged over the repeats
        for shares in zip(*(row["idle_share"] for row in repeats), strict=True):
            idle += f" {fmean(shares):4.0%}"
        idle = idle or "    -"  # a single stage has no idle share
        memory = ""  # one column per rank, the maximum over the repeats
        for peaks in zip(*(row["memory"].values() for row in repeats), strict=True):
            memory += f" {max(peaks) / 2**20:6.0f}"
        spread = f"± {seconds.deviation * 1e3:.1f}" if seconds.runs > 1 else ""
        duration = f"{seconds.mean * 1e3:>9.1f} {spread:<8}"
        lines.append(f"{mode:<10} {size:>10} {duration}{repeats[0]['ideal_bubble']:>6.1%} {idle} {memory}")
    bubbles = average_rows(rows, ("mode", "split_size"), "ideal_bubble")
    return Summary({"times": "\n".join(lines)}, [plot_times(cfg, gpus, times, bubbles)])


def plot_times(
    cfg: Config, gpus: int, times: dict[tuple[Any, ...], Average], bubbles: dict[tuple[Any, ...], Average]
) -> Curves:
    """Create a plot of the time per batch of each mode and of an ideal pipeline.

    `times` and `bubbles` contain the seconds per batch and the ideal bubble of each mode and split size. Naive mode
    runs one stage at a time. The ranks of an ideal pipeline divide this work evenly and are idle only in the bubble.
    """
    levels = {}
    pipelined = []
    for (mode, size), seconds in times.items():
        milliseconds = seconds.mean * 1e3
        if mode == "pipelined":
            pipelined.append((size, milliseconds, seconds.deviation * 1e3))
        else:
            levels[mode] = milliseconds

    stages = cfg.pipeline.stages
    computed = {}
    if "naive" in levels and pipelined:
        rank_time = levels["naive"] * cfg.pipeline.stages_per_process / stages
        ideal = [(size, rank_time / (1 - bubbles["pipelined", size].mean), 0.0) for size, _, _ in pipelined]
        computed["ideal: naive / ranks / (1 - ideal bubble)"] = ideal
    equal_threads = cfg.launch.threads or has_enough_gpus(cfg, gpus)
    threads = "" if equal_threads else "; single uses the threads of all stages"
    title = f"{cfg.model}, batch {cfg.batch}, {stages} stages{threads}"
    series = {"pipelined": pipelined} if pipelined else {}  # empty if all pipelined runs failed
    return Curves("split_size.png", series, "split size", "ms per batch", levels, computed, title)


GRID = SweepGrid(list_points, summarize_runs)
