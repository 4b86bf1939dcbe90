"""Settings of data parallelism, for every experiment whose ranks train the same model on shards of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.batch_plan import format_nearest_multiples, list_divisors
from configs.optional import InitialWeights, RanksPerNode


@dataclass
class Replicated(RanksPerNode):
    """Settings of ranks that hold the same model."""

    def check(self) -> None:
        super().check()
        ranks, microbatches = self.processes, self.batch_plan.microbatches
        if self.batch % (ranks * microbatches):
            counts = [d for d in list_divisors(self.batch) if d % self.launch.nodes == 0 and d <= ranks]
            fewer = f", or processes_per_node={counts[-1] // self.launch.nodes}" if counts else ""
            parts, fewer = (f" in accumulate={microbatches} microbatches", "") if microbatches > 1 else ("", fewer)
            what = f"batch={self.batch} cannot be shared evenly by {ranks} ranks{parts}"
            raise ValueError(f"{what}; use batch={format_nearest_multiples(self.batch, ranks * microbatches)}{fewer}")


@dataclass
class DataParallel(Replicated, InitialWeights):
    """Settings of DDP and of what it is compared with."""

    model: Literal["mlp", "convnet", "resnet18", "resnet50"] = "convnet"
    """mlp has two hidden layers, on MNIST 784-128-64-10; convnet has two 3x3 convolutions; resnet18 is ResNet-18 with
    the CIFAR stem; resnet50 begins as for ImageNet from 64 pixels on. All take images of any set."""
    sync_batchnorm: bool = False
    """Whether BatchNorm takes its statistics over the whole batch; else over each rank's shard."""

    def check(self) -> None:
        super().check()
        if self.sync_batchnorm and self.model in ("mlp", "convnet"):
            raise ValueError(f"sync_batchnorm=true: model={self.model} has no BatchNorm; use model=resnet18")
