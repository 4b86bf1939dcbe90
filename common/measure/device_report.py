"""Report of resnet_dataparallel: shards, memory and BatchNorm of its devices, and the sides of its comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch

from common.distributed.rendezvous import World
from common.measure import plots
from common.measure.memory import read_peak_memory
from common.measure.step_timing import ScalingReport, StepTimes, compute_imbalance, gather_step_times
from common.runs.result import Facts, Report
from configs.resnet_dataparallel import ONE_DEVICE, Config

AXIS = {"y": "training samples per second"}
TOO_FEW = "left out: {} training samples hold no full batch of {} to take turns with; lower batch"
BUFFERS = {  # the running statistics of BatchNorm
    "single": "one device sees every sample",
    "data_parallel": "kept from the first GPU's {} samples, thrown away with the other copies",
    "ddp": "each rank keeps its own, of {} samples a step; averaged before evaluations and saves",
    "synchronised": "the same on all ranks: each sees the statistics of the whole batch",
}


def report_devices(
    cfg: Config,
    world: World,
    times: StepTimes | None,
    compare: Callable[[], Mapping[str, list[float]]],
    folder: Path,
    gpus: int,
    samples: int,
    total: int,
) -> list[Report]:
    """Report memory, shards, BatchNorm and speed of the devices. All ranks call it; the reports are rank 0's.

    `compare` returns samples/s by side and round, {} where nothing is compared; `gpus` are those that one process can
    use; `samples` those of the training set; `total` the steps of the run.
    """
    parallel = cfg.strategy == "data_parallel"
    devices, own = max(1, gpus) if parallel else world.size, range(gpus) if parallel else ()
    used = [read_peak_memory(device) for device in [torch.device("cuda", index) for index in own] or [world.device]]
    held = [value for values in world.gather(used) for value in values]
    rates = compare()  # after the peaks are read: its models need memory, too
    rate = {name: mean(values) if values else 0.0 for name, values in rates.items()}  # rank 0 knows them
    one, many = next(iter(rate.values()), 0.0), rate.get(cfg.strategy, 0.0)
    step, single = (cfg.batch / value if value else 0.0 for value in (many, one))
    hosts = world.hosts if cfg.strategy == "ddp" else world.hosts * devices
    scaling = ScalingReport(gather_step_times(world, times), hosts, step, alone=single)
    if not world.is_main:
        return []
    partial = cfg.last_batch == "keep" and samples % cfg.batch and total >= -(-samples // cfg.batch)  # of a full epoch
    rest = count_samples_per_device(cfg, samples % cfg.batch, devices) if partial else None
    before = [rank.before_backward for rank in scaling.ranks]
    uneven = {"memory": compute_imbalance(held), "before_backward": compute_imbalance(before)}
    shown = describe_devices(cfg, devices, held, uneven, rest)
    if cfg.compare and devices > 1 and samples < cfg.batch:
        shown["comparison"] = TOO_FEW.format(samples, cfg.batch)
    memory = {f"{'device' if own else 'rank'} {number}": most for number, most in enumerate(held)}
    outcome = {"strategy": cfg.strategy, "devices": devices, "last_batch": rest}
    title = f"{cfg.model}, batch {cfg.batch}, {devices} {'GPU' if parallel else 'rank'}{'s' if devices > 1 else ''}"
    return [Facts(shown, outcome, {"imbalance": uneven}, memory), Comparison(rates, folder, gpus, title), scaling]


def count_samples_per_device(cfg: Config, count: int, devices: int) -> list[int]:
    """Return the samples of a batch that each device gets: DataParallel cuts equal chunks, and the last is smaller."""
    if cfg.strategy == "data_parallel":
        sizes = [len(chunk) for chunk in torch.arange(count).chunk(devices)]
        return sizes + [0] * (devices - len(sizes))
    return [len(part) for part in np.array_split(np.arange(count), devices)]


def describe_devices(
    cfg: Config, devices: int, held: list[int], imbalance: dict[str, float | None], rest: list[int] | None
) -> dict[str, str]:
    """Return the table's rows on shards, memory and BatchNorm; `held` are bytes by device."""
    seen = "synchronised" if cfg.sync_batchnorm and devices > 1 else cfg.strategy if devices > 1 else "single"
    own = count_samples_per_device(cfg, cfg.batch, devices)
    rows = {
        "strategy": f"{cfg.strategy}, {cfg.model}, batch {cfg.batch} = {format_sum(own)}",
        "memory": f"{', '.join(f'{value / 1e6:,.0f}' for value in held)} MB at most, by device",
        "BatchNorm": BUFFERS[seen].format(own[0]),
        "checkpoints": "the model's own names, without module., whatever the strategy",
    }
    if rest:
        rows["last batch"] = f"{sum(rest)} = {format_sum(rest)}"
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
    title: str
    """Of the plot."""

    def rows(self) -> dict[str, str]:
        """Return the table's rows; draws the plot, once the result is written."""
        if not self.rates:
            return {}
        heights = {name: (mean(values), stdev(values)) for name, values in self.rates.items()}
        one = next(iter(heights.values()))[0]
        rows = {
            name: f"{rate:,.0f} samples/s ± {off:.0f}, {rate / one:.2f} x the first"
            for name, (rate, off) in heights.items()
        }
        if "data_parallel" not in self.rates:
            rows["data_parallel"] = ONE_DEVICE.format(self.gpus)
        plots.draw_bars(self.folder / "compare.png", heights, **AXIS, title=self.title)
        return rows | {"plot": (self.folder / "compare.png").absolute().as_uri()}

    def result(self) -> Facts:
        """Return the values for result.json."""
        return Facts(measured={"compare": dict(self.rates)})


def format_sum(sizes: list[int]) -> str:
    """Return the sizes as a sum, shortened from nine on."""
    return " + ".join(map(str, sizes)) if len(sizes) <= 8 else f"{sizes[0]} + ... + {sizes[-1]}"
