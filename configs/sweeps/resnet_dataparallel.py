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
    if gpus > 1 and has_enough_gpus and not find_setting_without_data_parallel(cfg):
        strategies.insert(1, "data_parallel")
    device: PointSettings = {"launch.device": "cpu"} if gpus and not has_enough_gpus else {}
    points: list[PointSettings] = []
    for strategy in strategies:
        points.append({"strategy": strategy, "compare": False, **device, **list_resets(cfg, strategy)})
    return points


def find_setting_without_data_parallel(cfg: Config) -> str:
    """Return a setting of the config that strategy=data_parallel refuses, or an empty string."""
    if cfg.regularization.dropout:
        return f"dropout={cfg.regularization.dropout:g}"
    if cfg.memory.recompute != "none":
        return f"recompute={cfg.memory.recompute}"
    return ""


def list_resets(cfg: Config, strategy: str) -> PointSettings:
    """Return the defaults of the settings that belong to another strategy and that a strategy therefore refuses."""
    resets: PointSettings = {}
    if cfg.functional and strategy != "data_parallel":
        resets["functional"] = False
    if strategy == "ddp":
        return resets
    if cfg.ranks.processes_per_node > 1:
        resets["processes_per_node"] = 0
    if cfg.launch.nodes > 1:
        resets["launch.nodes"] = 1
    if cfg.sync_batchnorm:
        resets["sync_batchnorm"] = False
    if cfg.state_sharding.zero1:
        resets["zero1"] = False
    return resets


def summarize_runs(cfg: Config, gpus: int, rows: list[RunRow]) -> Summary:
    """Report the average samples per second of each strategy, and plot them as bars."""
    lines = {}
    heights = {}
    for (strategy,), rate in average_rows(rows, ["strategy"], "samples_per_second").items():
        spread = f" ± {rate.deviation:.0f}, {rate.runs} runs" if rate.runs > 1 else ", 1 run"
        lines[strategy] = f"{rate.mean:,.0f} samples/s{spread}"
        heights[strategy] = (rate.mean, rate.deviation)
    if "data_parallel" not in lines:
        setting = find_setting_without_data_parallel(cfg)
        reason = f"skipped, because it is not available with {setting}; to compare it, omit {setting}"
        lines["data_parallel"] = reason if setting and gpus > 1 else ONE_DEVICE_MESSAGE.format(gpus)
    title = f"{cfg.model}, batch {cfg.batch}"
    return Summary(lines, [Bars("strategies.png", heights, "training samples per second", title)])


GRID = SweepGrid(list_points, summarize_runs)
