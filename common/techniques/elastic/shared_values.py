"""Means of logged values over the ranks of an elastic run, computed while a step runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.measure.metrics_log import Values


class SharedValues:
    """Means over the ranks of the values that a step logs before its update.

    All ranks call `start` and `finish` in the same order. An all-reduce started before backward ends with it, because
    the ranks wait for each other there anyway.
    """

    def __init__(self) -> None:
        self.started: list[tuple[list[str], Tensor, Any]] = []
        """Names, table and work handle of each all-reduce."""

    def start(self, values: Values, flag: bool) -> None:
        """Start to average values. All ranks learn whether `flag` is set on any of them.

        Raises ValueError if this rank does not know a value: the other ranks would add up values of different names.
        """
        numbers = [float(flag)]
        names = sorted(values)
        for name in names:
            value = values[name]
            if value is None:
                raise ValueError(f"step.log({name}=None) before step.commit(): every rank must know the value")
            numbers.append(float(value))
        table = torch.tensor(numbers, dtype=torch.float64)
        self.started.append((names, table, dist.all_reduce(table, async_op=True)))

    def finish(self, ranks: int) -> tuple[dict[str, float], bool]:
        """Wait for the means; return them, and whether any rank has set its flag. Raises RuntimeError."""
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
