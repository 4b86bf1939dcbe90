"""Settings of data parallelism, for every experiment whose ranks train the same model on shards of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from configs.batch_plan import BatchPlan, format_nearest_multiples, list_divisors
from configs.optional import InitialWeights, RanksPerNode
from configs.ranges import between


@dataclass
class Replicated(RanksPerNode):
    """Settings of ranks that hold the same model."""

    def check(self) -> None:
        super().check()
        ranks, microbatches = self.processes, self.batch_plan.microbatches
        if not self.batch_plan.weights and self.batch % (ranks * microbatches):
            counts = [d for d in list_divisors(self.batch) if d % self.launch.nodes == 0 and d <= ranks]
            fewer = f", or processes_per_node={counts[-1] // self.launch.nodes}" if counts else ""
            parts, fewer = (f" in accumulate={microbatches} microbatches", "") if microbatches > 1 else ("", fewer)
            what = f"batch={self.batch} cannot be shared evenly by {ranks} ranks{parts}"
            raise ValueError(f"{what}; use batch={format_nearest_multiples(self.batch, ranks * microbatches)}{fewer}")


@dataclass
class Sharded(Replicated):
    """Settings of ranks that may be unequally fast, or on different devices."""

    joins_devices: ClassVar[bool] = True

    shards: list[str] = field(default_factory=lambda: ["equal"])
    """How the ranks share each batch: equal; a whole number for each rank, such as [3,1], to which its samples are in
    proportion, 0 for a rank without any; or auto, which measures how fast each rank is, before the first step and
    while training. The result is that of one process in any case."""
    dropout: float = between(0, 0.95, 0)
    """Share of the last layer's inputs that training sets to zero. A sample's mask follows from its position in the
    epoch, so that shards and microbatches change nothing."""

    @property
    def batch_plan(self) -> BatchPlan:
        return BatchPlan(self.batch, self.processes, weights=self.parse_shards())

    def parse_shards(self) -> tuple[int, ...]:
        """Return what the shards of the ranks are in proportion to at first; () for equal ones. Raises ValueError."""
        ranks, given = self.processes, ",".join(self.shards)
        if given in ("equal", "auto"):
            return (1,) * ranks if given == "auto" else ()
        if not all(one.isdecimal() and len(one) < 10 for one in self.shards) or not self.shards:
            raise ValueError(
                f"shards=[{given}]: write equal, auto, or a whole number >= 0 for each rank, such as [3,1]"
            )
        if len(self.shards) != ranks:
            example = ",".join(["3", *["1"] * (ranks - 1)])
            raise ValueError(
                f"shards=[{given}]: {len(self.shards)} numbers, {ranks} ranks; write one for each, such as [{example}]"
            )
        weights = tuple(map(int, self.shards))
        if not any(weights):
            raise ValueError(f"shards=[{given}] leaves every rank without a sample; give at least one a number > 0")
        return weights

    def check(self) -> None:
        super().check()
        microbatches = self.batch_plan.microbatches
        if self.batch % microbatches:
            what = f"batch={self.batch} does not divide into accumulate={microbatches} microbatches"
            raise ValueError(f"{what}; use batch={format_nearest_multiples(self.batch, microbatches)}")
        least = self.processes * microbatches
        if self.shards == ["auto"] and self.batch < least:
            raise ValueError(f"shards=auto gives each rank one sample at least; use batch={least}, or fewer ranks")


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
