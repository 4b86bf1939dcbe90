"""The sweep of resnet_modelparallel: single and naive with whole batches, pipelined with microbatches of many sizes."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import Any

from configs.resnet_modelparallel import Config
from configs.sweeps import Cell, Curves, Grid, Row, Summary, average_rows

BRIEF = 12  # steps of a run


def list_points(cfg: Config, gpus: int) -> list[Cell]:
    """Return single and naive with the whole batch, pipelined with each size of microbatches.

    Unless `steps` says otherwise the runs are short: what is measured is what a step costs. All run on one kind of
    device.
    """
    brief: Cell = {} if cfg.steps else {"steps": BRIEF, "data.test_limit": cfg.data.test_limit or cfg.eval_batch}
    grid: list[Cell] = [{"mode": mode, "split_size": cfg.batch_plan.shard} for mode in ("single", "naive")]
    grid += [{"mode": "pipelined", "split_size": int(size)} for size in cfg.split_sizes]
    some = cfg.launch.device == "auto" and gpus and not runs_on_gpus(cfg, gpus)
    alike: Cell = {"launch.device": "cpu"} if some else {}
    return [cell | brief | alike for cell in grid]


def runs_on_gpus(cfg: Config, gpus: int) -> bool:
    """Return whether there are GPUs enough for the ranks of every mode."""
    gpus = 0 if cfg.launch.on_cpu or "cpu" in cfg.devices else gpus
    modes: tuple[Any, ...] = ("single", "naive", "pipelined")
    chosen = [replace(cfg, mode=mode) for mode in modes]
    for one in chosen:
        one.fit_devices(gpus)
    return all(gpus >= one.processes for one in chosen)


def summarize_runs(cfg: Config, gpus: int, rows: list[Row]) -> Summary:
    """Report time per batch against the size of microbatches, and the idle share and memory of each stage."""
    times = average_rows(rows, ("mode", "split_size"), "step_seconds")
    lines = ["mode       split size      ms a batch   bubble  idle share, and peak MiB, of each stage's rank"]
    for (mode, size), (mean, deviation, count) in times.items():
        same = [row for row in rows if (row["cell"]["mode"], row["cell"]["split_size"]) == (mode, size)]
        idle = "".join(f" {fmean(shares):4.0%}" for shares in zip(*(row["idle_share"] for row in same), strict=True))
        memory = zip(*(row["memory"].values() for row in same), strict=True)
        held = "".join(f" {max(amounts) / 2**20:6.0f}" for amounts in memory)
        spread = f"± {deviation * 1e3:.1f}" if count > 1 else ""
        took = f"{mean * 1e3:>9.1f} {spread:<8}{same[0]['ideal_bubble']:>6.1%}"
        lines.append(f"{mode:<10} {size:>10} {took} {idle} {held}")
    return Summary({"times": "\n".join(lines)}, [plot_times(cfg, gpus, times)])


def plot_times(cfg: Config, gpus: int, times: dict[Any, tuple[float, float, int]]) -> Curves:
    """Plot each mode's time a batch, and the ideal: p equal stages share the naive time and wait p - 1 turns."""
    levels = {mode: mean * 1e3 for (mode, _), (mean, _, _) in times.items() if mode != "pipelined"}
    pipelined = [(size, mean * 1e3, off * 1e3) for (mode, size), (mean, off, _) in times.items() if mode == "pipelined"]
    p, computed = cfg.stages, {}
    if "naive" in levels and pipelined:
        ideal = [
            (size, levels["naive"] / p * (1 + (p - 1) * size / cfg.batch_plan.shard), 0.0) for size, _, _ in pipelined
        ]
        computed["ideal: naive / p x (m + p - 1) / m"] = ideal
    threads = "" if cfg.launch.threads or runs_on_gpus(cfg, gpus) else "; single has the threads of all of them"
    title = f"{cfg.model}, batch {cfg.batch}, {p} stages{threads}"
    series = {"pipelined": pipelined} if pipelined else {}  # none where all those runs failed
    return Curves("split_size.png", series, "split size", "ms a batch", levels, computed, title)


GRID = Grid(list_points, summarize_runs, measured=("split",))
