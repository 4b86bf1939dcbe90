"""Report of the resnet_dataparallel experiment: shards, memory, BatchNorm, and a comparison of strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch

from common.measure import plots
from common.measure.memory import read_peak_memory
from common.measure.step_timing import StepTimer, gather_step_times
from common.ranks.rendezvous import World
from common.runs.result import Report, ReportData
from common.techniques.data_parallel.scaling_report import ScalingReport, compute_imbalance
from common.techniques.data_parallel.single_process_baseline import SKIPPED_COMPARISON
from configs.networks import get_network_name
from configs.resnet_dataparallel import ONE_DEVICE_MESSAGE, Config

NO_COMPARISON = "skipped: the training set has {} samples, fewer than one batch of {}; lower batch"
BATCHNORM_STATISTICS = {
    "single": "computed on one device, from all samples",
    "data_parallel": "only the first GPU's statistics (from {} samples) are kept; those of other GPUs are discarded",
    "ddp": "each rank has its own statistics (from {} samples per step), averaged before an evaluation or a checkpoint",
    "synchronized": "the same on all ranks: each rank uses the statistics of the whole batch",
}


def report_devices(
    cfg: Config,
    world: World,
    times: StepTimer | None,
    compare: Callable[[], Mapping[str, list[float]]],
    folder: Path,
    gpus: int,
    samples: int,
    total: int,
) -> list[Report]:
    """Report memory, shards, BatchNorm and speed of all devices.

    All ranks must call this function. The function returns reports on rank 0 and an empty list on all other ranks.

    The function `compare` returns the samples per second in each round by strategy, or {} if strategies are not
    compared. `gpus` is the number of GPUs that one process can use, `samples` is the size of the training set, and
    `total` is the number of steps of the run.
    """
    in_one_process = cfg.strategy == "data_parallel"
    devices = max(1, gpus) if in_one_process else world.size

    # Rank 0 gets the peak memory of all devices.
    local_devices = [torch.device("cuda", index) for index in range(gpus)] if in_one_process else []
    local_peaks = [read_peak_memory(device) for device in local_devices or [world.device]]
    peaks: list[int] = []
    for rank_peaks in world.gather(local_peaks):
        peaks += rank_peaks

    rates = compare()  # after reading the peaks, because the comparison also uses memory
    # On ranks other than 0, all mean rates are 0.
    mean_rates = {name: mean(values) if values else 0.0 for name, values in rates.items()}
    single_rate = next(iter(mean_rates.values()), 0.0)
    strategy_rate = mean_rates.get(cfg.strategy, 0.0)
    hosts = world.hosts if cfg.strategy == "ddp" else world.hosts * devices
    step_seconds = cfg.batch / strategy_rate if strategy_rate else 0.0
    single_step_seconds = cfg.batch / single_rate if single_rate else 0.0
    scaling = ScalingReport(
        gather_step_times(world, times), hosts, step_seconds, single_rank_seconds=single_step_seconds
    )
    if not world.is_main:
        return []

    last_batch = None
    has_full_epoch = total >= -(-samples // cfg.batch)  # the number of batches in the training set, rounded up
    if cfg.last_batch == "keep" and samples % cfg.batch and has_full_epoch:
        last_batch = count_samples_per_device(cfg, samples % cfg.batch, devices)

    seconds = [rank.before_backward for rank in scaling.ranks]
    imbalance = {"memory": compute_imbalance(peaks), "before_backward": compute_imbalance(seconds)}
    rows = describe_devices(cfg, devices, peaks, imbalance, last_batch)
    if cfg.compare and devices > 1 and not rates:
        rows["comparison"] = SKIPPED_COMPARISON if samples >= cfg.batch else NO_COMPARISON.format(samples, cfg.batch)

    kind = "device" if local_devices else "rank"
    memory = {f"{kind} {number}": peak for number, peak in enumerate(peaks)}
    outcome = {"strategy": cfg.strategy, "devices": devices, "last_batch": last_batch}
    unit = ("GPU" if in_one_process else "rank") + ("s" if devices > 1 else "")
    title = f"{get_network_name(cfg.model)}, batch {cfg.batch}, {devices} {unit}"
    facts = ReportData(rows, outcome, {"imbalance": imbalance}, memory)
    return [facts, StrategyComparison(rates, folder, gpus, title), scaling]


def count_samples_per_device(cfg: Config, count: int, devices: int) -> list[int]:
    """Return the number of samples per device for a batch of `count` samples.

    DataParallel divides a batch into chunks of equal size, except that the last chunk may be smaller. All other
    strategies divide a batch into shards whose sizes differ by at most one.
    """
    if cfg.strategy == "data_parallel":
        sizes = [len(chunk) for chunk in torch.arange(count).chunk(devices)]
        return sizes + [0] * (devices - len(sizes))
    return [len(part) for part in np.array_split(np.arange(count), devices)]


def describe_devices(
    cfg: Config, devices: int, peaks: list[int], imbalance: dict[str, float | None], last_batch: list[int] | None
) -> dict[str, str]:
    """Return the rows of the final table about shards, memory and BatchNorm.

    `peaks` contains the peak memory of each device in bytes. `imbalance` contains, for each measured quantity, the
    fraction by which the maximum over the devices exceeds the mean. `last_batch` contains the number of samples per
    device in a partial last batch, or is None if there is no partial last batch.
    """
    statistics = "single"
    if devices > 1:
        statistics = "synchronized" if cfg.sync_batchnorm else cfg.strategy
    sizes = count_samples_per_device(cfg, cfg.batch, devices)
    megabytes = ", ".join(f"{peak / 1e6:,.0f}" for peak in peaks)
    rows = {
        "strategy": f"{cfg.strategy}, {get_network_name(cfg.model)}, batch {cfg.batch} = {format_sizes_as_sum(sizes)}",
        "memory": f"peak of each device: {megabytes} MB",
        "BatchNorm": BATCHNORM_STATISTICS[statistics].format(sizes[0]),
        "checkpoints": "parameter names do not start with module., regardless of the strategy",
    }
    if last_batch:
        rows["last batch"] = f"{sum(last_batch)} = {format_sizes_as_sum(last_batch)}"
    shares = [f"{name.replace('_', ' ')} {value:.0%}" for name, value in imbalance.items() if value is not None]
    if shares:
        rows["imbalance"] = f"{', '.join(shares)} (excess of the maximum over the mean)"
    return rows


@dataclass(frozen=True)
class StrategyComparison:
    """A report that compares the throughput of strategies."""

    rates: Mapping[str, list[float]]
    """Samples per second in each round, by strategy."""
    folder: Path
    gpus: int
    """Number of GPUs that one process can use."""
    title: str
    """Title of the plot."""

    def rows(self) -> dict[str, str]:
        """Write the plot compare.png, and return the report's rows of the final table."""
        if not self.rates:
            return {}
        heights = {name: (mean(values), stdev(values)) for name, values in self.rates.items()}
        first_rate = next(iter(heights.values()))[0]
        rows: dict[str, str] = {}
        for name, (rate, deviation) in heights.items():
            speedup = f"{rate / first_rate:.2f} times the rate of the first strategy"
            rows[name] = f"{rate:,.0f} samples/s ± {deviation:.0f}, {speedup}"
        if "data_parallel" not in self.rates:
            rows["data_parallel"] = ONE_DEVICE_MESSAGE.format(self.gpus)
        path = self.folder / "compare.png"
        plots.draw_bar_chart(path, heights, "training samples per second", title=self.title)
        rows["plot"] = path.absolute().as_uri()
        return rows

    def result(self) -> ReportData:
        """Return the measured samples per second for result.json."""
        return ReportData(measured={"compare": dict(self.rates)})


def format_sizes_as_sum(sizes: list[int]) -> str:
    """Format sizes as a sum, such as "8 + 8".

    If there are more than eight sizes, the sum contains only the first and the last size.
    """
    return " + ".join(map(str, sizes)) if len(sizes) <= 8 else f"{sizes[0]} + ... + {sizes[-1]}"
