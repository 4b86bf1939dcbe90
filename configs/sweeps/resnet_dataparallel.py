"""The sweep of resnet_dataparallel: each strategy as runs of its own, with all cores in each."""

from __future__ import annotations

from dataclasses import replace

from configs.resnet_dataparallel import ONE_DEVICE, Config
from configs.sweeps import Bars, Cell, Grid, Row, Summary, average_rows


def list_points(cfg: Config, gpus: int) -> list[Cell]:
    """Return the strategies that differ on this machine; with fewer GPUs than ddp's ranks all of them on the CPU."""
    gpus = 0 if cfg.launch.on_cpu else gpus
    enough = gpus >= replace(cfg, strategy="ddp").processes
    names = ["single", *(["data_parallel"] if gpus > 1 and enough else []), "ddp"]
    alike = {"launch.device": "cpu"} if gpus and not enough else {}
    return [{"strategy": name, "compare": False} | alike for name in names]


def summarize_runs(cfg: Config, gpus: int, rows: list[Row]) -> Summary:
    """Report samples per second of each strategy."""
    rates = {str(name): found for (name,), found in average_rows(rows, ["strategy"], "samples_per_second").items()}
    lines = {
        name: f"{rate:,.0f} samples/s" + (f" ± {off:.0f}, {count} runs" if count > 1 else ", 1 run")
        for name, (rate, off, count) in rates.items()
    }
    if "data_parallel" not in lines:
        lines["data_parallel"] = ONE_DEVICE.format(gpus)
    heights = {name: (rate, off) for name, (rate, off, _) in rates.items()}
    return Summary(
        lines, [Bars("strategies.png", heights, "training samples per second", f"{cfg.model}, batch {cfg.batch}")]
    )


GRID = Grid(list_points, summarize_runs)
