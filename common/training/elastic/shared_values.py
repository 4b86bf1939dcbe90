"""Values of a step on their way to all ranks of an elastic run, while the step goes on."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.measure.metrics_log import Values


class SharedValues:
    """Means over the ranks of the values that a step logs before its update.

    All ranks call `start` and `finish` in the same order. What is started before backward has ended with it, as the
    ranks wait for each other there anyway.
    """

    def __init__(self) -> None:
        self.started: list[tuple[list[str], Tensor, Any]] = []
        """Of each all-reduce: the names, the table that it changes, and what to wait for."""

    def start(self, values: Values, flag: bool) -> None:
        """Start to average values; `flag` is known to all ranks once it is set on one of them.

        Raises ValueError for a value that this rank does not know: the others would add up what belongs to other names.
        """
        own, names = [float(flag)], sorted(values)
        for name in names:
            if (value := values[name]) is None:
                raise ValueError(f"step.log({name}=None) before step.commit(): every rank must know the value")
            own.append(float(value))
        table = torch.tensor(own, dtype=torch.float64)
        self.started.append((names, table, dist.all_reduce(table, async_op=True)))

    def finish(self, ranks: int) -> tuple[dict[str, float], bool]:
        """Wait for the means; return them, and whether any rank has set its flag. Raises RuntimeError."""
        means, flagged = dict[str, float](), False
        started, self.started = self.started, []
        for names, table, work in started:
            work.wait()
            flag, *sums = table.tolist()
            flagged |= flag > 0
            means |= {name: value / ranks for name, value in zip(names, sums, strict=True)}
        return means, flagged
