"""Settings of data parallelism: experiments whose ranks train the same model on shards of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from configs.batch_plan import BatchPlan, format_nearest_multiples, list_divisors
from configs.optional import InitialWeights, RanksPerNode
from configs.ranges import between


@dataclass
class Replicated(RanksPerNode):
    """Settings of ranks with identical models."""

    def check(self) -> None:
        super().check()
        ranks = self.processes
        microbatches = self.batch_plan.microbatches
        if self.batch_plan.weights or self.batch % (ranks * microbatches) == 0:
            return
        problem = f"batch={self.batch} cannot be divided evenly among {ranks} ranks"
        remedy = f"use batch={format_nearest_multiples(self.batch, ranks * microbatches)}"
        if microbatches > 1:
            raise ValueError(f"{problem} with accumulate={microbatches} microbatches; {remedy}")
        nodes = self.launch.nodes
        smaller_counts = [count for count in list_divisors(self.batch) if count % nodes == 0 and count <= ranks]
        if smaller_counts:
            remedy += f", or processes_per_node={smaller_counts[-1] // nodes}"
        raise ValueError(f"{problem}; {remedy}")


@dataclass
class Sharded(Replicated):
    """Settings of ranks with unequal speed or different devices."""

    can_mix_devices: ClassVar[bool] = True

    shards: list[str] = field(default_factory=lambda: ["equal"])
    """Division of each batch among the ranks: equal; a list of integer weights, one per rank, such as [3,1], where 0
    gives a rank no samples; or auto, which measures the speed of each rank before the first step and during training.
    The training result is that of one process in all cases."""
    dropout: float = between(0, 0.95, 0)
    """Dropout probability for the inputs of the last layer. The mask of a sample depends only on its position in the
    epoch, so shards and microbatches do not change the result."""

    @property
    def batch_plan(self) -> BatchPlan:
        return BatchPlan(self.batch, self.processes, weights=self.parse_shards())

    def parse_shards(self) -> tuple[int, ...]:
        """Return the initial relative shard sizes of the ranks; () for equal ones. Raises ValueError."""
        ranks = self.processes
        text = ",".join(self.shards)
        if text == "equal":
            return ()
        if text == "auto":
            return (1,) * ranks
        if not self.shards or not all(weight.isdecimal() and len(weight) < 10 for weight in self.shards):
            raise ValueError(f"shards=[{text}]: use equal, auto, or one integer >= 0 per rank, such as [3,1]")
        if len(self.shards) != ranks:
            example = ",".join(["3", *["1"] * (ranks - 1)])
            raise ValueError(
                f"shards=[{text}] has length {len(self.shards)}, but there are {ranks} ranks; "
                f"give one per rank, such as [{example}]"
            )
        weights = tuple(map(int, self.shards))
        if not any(weights):
            raise ValueError(f"shards=[{text}] gives no rank any samples; use at least one number > 0")
        return weights

    def check(self) -> None:
        super().check()
        microbatches = self.batch_plan.microbatches
        if self.batch % microbatches:
            remedy = f"use batch={format_nearest_multiples(self.batch, microbatches)}"
            raise ValueError(f"batch={self.batch} is not divisible by accumulate={microbatches}; {remedy}")
        min_batch = self.processes * microbatches
        if self.shards == ["auto"] and self.batch < min_batch:
            raise ValueError(f"shards=auto needs at least one sample per rank; use batch={min_batch} or fewer ranks")


@dataclass
class DataParallel(Replicated, InitialWeights):
    """Settings of DDP and of the strategies it is compared with."""

    model: Literal["mlp", "convnet", "resnet18", "resnet50"] = "convnet"
    """mlp has two hidden layers (784-128-64-10 on MNIST); convnet has two 3x3 convolutions; resnet18 is ResNet-18 with
    the CIFAR stem; resnet50 has the ImageNet stem from 64 pixels on. All accept the images of any data set."""
    sync_batchnorm: bool = False
    """Compute BatchNorm statistics over the whole batch instead of over the shard of each rank."""

    def check(self) -> None:
        super().check()
        if self.sync_batchnorm and self.model in ("mlp", "convnet"):
            raise ValueError(f"sync_batchnorm=true: model={self.model} has no BatchNorm; use model=resnet18")
