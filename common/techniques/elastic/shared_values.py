"""Averaging of logged values over the ranks of an elastic run, overlapped with the training step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.measure.metrics_log import Values


class AveragedValues:
    """Asynchronous averaging, over all ranks, of the values that a step logs before its update.

    All ranks must call `start_averaging` and `finish_averaging` in the same order. An all-reduce that starts before
    backward adds almost no time, because the ranks wait for each other during backward anyway.
    """

    def __init__(self) -> None:
        self.started: list[tuple[list[str], Tensor, Any]] = []
        """Names of the averaged values, tensor with the flag and the values, and work handle, for each all-reduce."""

    def start_averaging(self, values: Values, flag: bool) -> None:
        """Start averaging values over the ranks and determining whether `flag` is set on any rank.

        Raises ValueError if a value is None, because every rank must contribute a number to each average.
        """
        numbers = [float(flag)]
        names = sorted(values)
        for name in names:
            value = values[name]
            if value is None:
                problem = f"step.log({name}=None) was called before step.commit()"
                raise ValueError(f"{problem}; every rank must know the value of {name}")
            numbers.append(float(value))
        table = torch.tensor(numbers, dtype=torch.float64)
        self.started.append((names, table, dist.all_reduce(table, async_op=True)))

    def finish_averaging(self, ranks: int) -> tuple[dict[str, float], bool]:
        """Return the averages by name, and whether the flag is set on any rank, after waiting for all averages.

        `ranks` is the number of ranks. Raises RuntimeError if communication fails.
        """
        means = dict[str, float]()
        is_flagged = False
        started = self.started
        self.started = []
        for names, table, work in started:
            work.wait()
            flag, *sums = table.tolist()
            is_flagged |= flag > 0
            for name, value in zip(names, sums, strict=True):
                means[name] = value / ranks
        return means, is_flagged
