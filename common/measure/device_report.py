"""What the devices of resnet_dataparallel held and did: shards, memory, and the sides of its comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch

from common.measure import plots
from common.runs.result import Added
from configs.resnet_dataparallel import ONE_DEVICE, Config

AXIS = {"y": "training samples per second"}
BUFFERS = {  # what becomes of its running statistics
    "single": "one device sees every sample",
    "data_parallel": "kept from the first GPU's {} samples, thrown away with the other copies",
    "ddp": "each rank keeps its own, of {} samples a step; averaged before evaluations and saves",
    "synchronised": "the same on all ranks: each sees the statistics of the whole batch",
}


def shards(cfg: Config, count: int, devices: int) -> list[int]:
    """How many samples of a batch each device gets: DataParallel cuts chunks of equal size, and the last is smaller."""
    if cfg.strategy == "data_parallel":
        sizes = [len(chunk) for chunk in torch.arange(count).chunk(devices)]
        return sizes + [0] * (devices - len(sizes))
    return [len(part) for part in np.array_split(np.arange(count), devices)]


def describe_devices(
    cfg: Config, devices: int, held: list[int], imbalance: dict[str, float | None], rest: list[int] | None
) -> dict[str, str]:
    """Rows of the table on shards, memory and BatchNorm; `held` are bytes by device."""
    seen = "synchronised" if cfg.sync_batchnorm and devices > 1 else cfg.strategy if devices > 1 else "single"
    own = shards(cfg, cfg.batch, devices)
    rows = {
        "strategy": f"{cfg.strategy}, {cfg.model}, batch {cfg.batch} = {join_sizes(own)}",
        "memory": f"{', '.join(f'{value / 1e6:,.0f}' for value in held)} MB at most, by device",
        "BatchNorm": BUFFERS[seen].format(own[0]),
        "checkpoints": "the model's own names, without module., whatever the strategy",
    }
    if rest:
        rows["last batch"] = f"{sum(rest)} = {join_sizes(rest)}"
    uneven = [f"{name.replace('_', ' ')} {value:.0%}" for name, value in imbalance.items() if value is not None]
    if uneven:
        rows["imbalance"] = f"{', '.join(uneven)} (the largest above the mean)"
    return rows


@dataclass(frozen=True)
class Comparison:
    """The report on the sides of the comparison: samples per second of each, round by round."""

    rates: Mapping[str, list[float]]
    folder: Path
    gpus: int
    """GPUs that one process can use."""

    def rows(self) -> dict[str, str]:
        """For the table; draws the picture, once the result is written."""
        if not self.rates:
            return {}
        heights = {name: (mean(values), stdev(values)) for name, values in self.rates.items()}
        one = next(iter(heights.values()))[0]
        rows = {
            name: f"{rate:,.0f} samples/s +- {off:.0f}, {rate / one:.2f} x the first"
            for name, (rate, off) in heights.items()
        }
        if "data_parallel" not in self.rates:
            rows["data_parallel"] = ONE_DEVICE.format(self.gpus)
        plots.bars(self.folder / "compare.png", heights, **AXIS)
        return rows | {"plot": str(self.folder / "compare.png")}

    def result(self) -> Added:
        """For result.json."""
        return Added(measured={"compare": dict(self.rates)})


def join_sizes(sizes: list[int]) -> str:
    """Return the sizes as a sum, shortened from nine on."""
    return " + ".join(map(str, sizes)) if len(sizes) <= 8 else f"{sizes[0]} + ... + {sizes[-1]}"
