"""Sweep of resnet_dataparallel: separate runs for each strategy. Each run uses all cores."""

from __future__ import annotations

from dataclasses import replace

from configs.resnet_dataparallel import ONE_DEVICE_MESSAGE, Config
from configs.sweeps import Bars, PointSettings, RunRow, Summary, SweepGrid, average_rows


def list_points(cfg: Config, gpus: int) -> list[PointSettings]:
    """Return the strategies that differ from each other on this machine.

    All strategies run on the CPU if ddp has more ranks than the machine has GPUs.
    """
    if cfg.launch.excludes_gpus:
        gpus = 0
    has_enough_gpus = gpus >= replace(cfg, strategy="ddp").processes
    strategies = ["single", "ddp"]
    if gpus > 1 and has_enough_gpus:
        strategies.insert(1, "data_parallel")
    device: PointSettings = {"launch.device": "cpu"} if gpus and not has_enough_gpus else {}
    return [{"strategy": strategy, "compare": False, **device} for strategy in strategies]


def summarize_runs(cfg: Config, gpus: int, rows: list[RunRow]) -> Summary:
    """Report the average samples per second of each strategy, and plot them as bars."""
    lines = {}
    heights = {}
    for (strategy,), rate in average_rows(rows, ["strategy"], "samples_per_second").items():
        spread = f" ± {rate.deviation:.0f}, {rate.runs} runs" if rate.runs > 1 else ", 1 run"
        lines[strategy] = f"{rate.mean:,.0f} samples/s{spread}"
        heights[strategy] = (rate.mean, rate.deviation)
    if "data_parallel" not in lines:
        lines["data_parallel"] = ONE_DEVICE_MESSAGE.format(gpus)
    title = f"{cfg.model}, batch {cfg.batch}"
    return Summary(lines, [Bars("strategies.png", heights, "training samples per second", title)])


GRID = SweepGrid(list_points, summarize_runs)
