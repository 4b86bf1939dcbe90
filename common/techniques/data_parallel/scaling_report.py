"""Report on the scaling of data-parallel training: step times of each rank, stragglers, and communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch import nn

from common.measure.step_timing import MIN_STEPS, RankTimes
from common.measure.straggler import find_straggler
from common.measure.timing import time_calls
from common.runs.result import ReportData


def time_gradient_all_reduce(model: nn.Module, bucket_mb: float, size: int, repeats: int = 5) -> float | None:
    """Return the median time in seconds of an all-reduce of all gradients, without computation.

    All ranks must call this function. Returns None if there is only one rank. The gradients are sent in buckets of
    `bucket_mb` MiB, as floating-point numbers of `size` bytes.
    """
    if dist.get_world_size() == 1:
        return None
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    dtype = {2: torch.float16, 4: torch.float32, 8: torch.float64}[size]
    count = sum(parameter.numel() for parameter in parameters)
    flat = torch.zeros(count, dtype=dtype, device=parameters[0].device)
    buckets = flat.split(max(1, int(bucket_mb * 2**20) // size))

    def all_reduce_buckets() -> None:
        works = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
        for work in works:
            assert work is not None
            work.wait()

    return median(time_calls(all_reduce_buckets, flat.device, repeats, prepare=dist.barrier))


def compute_imbalance(values: Sequence[float]) -> float | None:
    """Return the fraction by which the maximum of the values exceeds their mean.

    Returns None if there is at most one value.
    """
    return max(values) / fmean(values) - 1 if len(values) > 1 else None


@dataclass(frozen=True)
class ScalingReport:
    """Report on step times, stragglers, communication and scaling efficiency of a data-parallel run."""

    ranks: Sequence[RankTimes]
    hosts: Sequence[str]
    """Host name of each rank, or of each device if one process uses several devices."""
    step_seconds: float
    """Duration of a step in seconds."""
    communication_seconds: float | None = None
    """Time in seconds that the communication of one step takes without computation; None if it was not measured."""
    single_rank_seconds: float = 0.0
    """Duration in seconds of the same step on a single rank; 0 if it was not measured."""

    @property
    def exposed_fraction(self) -> float | None:
        """The fraction of the communication that does not overlap with backward.

        In each step, the rank that waited for the shortest time is used, because the other ranks have also waited for
        slower ranks. The value is None if the communication was not measured.
        """
        # A rank that has joined the run later has fewer steps, so the steps are aligned at the newest step.
        newest_first = [rank.exposed[::-1] for rank in self.ranks]
        steps = list(zip(*newest_first, strict=False))
        if not steps or not self.communication_seconds or len(self.ranks) == 1:
            return None
        return min(1.0, median(min(step) for step in steps) / self.communication_seconds)

    @property
    def efficiency(self) -> float | None:
        """The scaling efficiency: 1.0 if p ranks are p times as fast as one.

        The value is None if the step time of a single rank was not measured.
        """
        return (
            self.single_rank_seconds / self.step_seconds / len(self.hosts)
            if self.single_rank_seconds and self.step_seconds
            else None
        )

    @property
    def straggler(self) -> int | None:
        """The rank that is clearly slower than the others before backward, or None."""
        slowest = self._find_straggler_times()
        return None if slowest is None else slowest.rank

    def _find_straggler_times(self) -> RankTimes | None:
        """Return the times of the straggler.

        Returns None if there is no straggler, or if a rank has measured fewer than MIN_STEPS steps.
        """
        if not self.ranks or min(rank.steps for rank in self.ranks) < MIN_STEPS:
            return None
        seconds = [rank.before_backward for rank in self.ranks]
        index = find_straggler(seconds, [rank.samples for rank in self.ranks])
        return None if index is None else self.ranks[index]

    def rows(self) -> dict[str, str]:
        """Return the rows that this report adds to the final table."""
        rows: dict[str, str] = {}
        if self.ranks:
            lines = [
                f"rank {rank.rank}: data {rank.data * 1e3:.2f}, before backward {rank.before_backward * 1e3:.2f}, "
                f"step {rank.step * 1e3:.2f}"
                for rank in self.ranks
            ]
            rows["ms per step"] = "\n".join(lines)

        slowest = self._find_straggler_times()
        if slowest is not None:
            median_of_others = median(rank.before_backward for rank in self.ranks if rank is not slowest)
            rows["straggler"] = (
                f"rank {slowest.rank} on {self.hosts[slowest.rank]}: {slowest.before_backward * 1e3:.2f} ms from "
                f"step start to backward (median of the other ranks: {median_of_others * 1e3:.2f} ms)"
            )

        exposed = self.exposed_fraction
        if exposed is not None and self.communication_seconds is not None:
            milliseconds = self.communication_seconds * 1e3
            rows["communication"] = f"{milliseconds:.2f} ms per step, {exposed:.0%} not overlapped with backward"

        if self.efficiency is not None:
            rows["efficiency"] = (
                f"{self.efficiency:.0%} of the ideal {len(self.hosts)}-fold speedup "
                f"(actual speedup {self.single_rank_seconds / self.step_seconds:.2f}; "
                f"one rank alone takes {self.single_rank_seconds * 1e3:.2f} ms per step)"
            )
        return rows

    def result(self) -> ReportData:
        """Return the values that this report adds to result.json. Times are in seconds."""
        ranks = []
        for rank in self.ranks:
            fields = asdict(rank)
            del fields["exposed"]
            ranks.append(fields)
        measured = {
            "ranks": ranks,
            "straggler": self.straggler,
            "communication_seconds": self.communication_seconds,
            "communication_exposed": self.exposed_fraction,
            "single_rank_step_seconds": self.single_rank_seconds or None,
            "efficiency": self.efficiency,
        }
        return ReportData(measured={name: value for name, value in measured.items() if value is not None})
