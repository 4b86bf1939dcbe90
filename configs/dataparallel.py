"""Settings of data parallelism, for every experiment whose processes train the same model on shares of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.shared import Experiment, at_least, divisors


@dataclass
class DataParallel(Experiment):
    model: Literal["convnet", "resnet18"] = "convnet"
    """convnet has two 3x3 convolutions; resnet18 is ResNet-18 with the CIFAR stem. Both take images of any set."""
    processes_per_node: int = at_least(0, 0)
    """Processes on each host; 0 means two on one host and one on each of several."""
    sync_batchnorm: bool = False
    """Whether BatchNorm takes its statistics over the whole batch; else over each process's share."""

    @property
    def processes(self) -> int:
        nodes = self.launch.nodes
        return nodes * (self.processes_per_node or (2 if nodes == 1 else 1))

    def check(self) -> None:
        super().check()
        if self.batch % self.processes:
            lower = self.batch // self.processes * self.processes
            sizes = [str(size) for size in (lower, lower + self.processes) if size]
            counts = [d for d in divisors(self.batch) if d % self.launch.nodes == 0]
            fewer = [d // self.launch.nodes for d in counts if d <= self.processes][-1:]
            hint = f", or processes_per_node={fewer[0]}" if fewer else ""
            raise ValueError(
                f"batch={self.batch} cannot be shared evenly by {self.processes} processes; "
                f"use batch={' or '.join(sizes)}{hint}"
            )
        if self.sync_batchnorm and self.model == "convnet":
            raise ValueError("sync_batchnorm=true: model=convnet has no BatchNorm; use model=resnet18")
