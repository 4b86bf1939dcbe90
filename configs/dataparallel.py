"""Settings for data parallelism: every rank trains the same model on its own shard of each batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from configs.batch_plan import BatchPlan, format_nearest_multiples, list_divisors
from configs.optional import InitialWeights, RanksPerNode
from configs.ranges import between


@dataclass
class Replicated(RanksPerNode):
    """Settings for experiments in which all ranks train the same model."""

    def check(self) -> None:
        super().check()
        ranks = self.processes
        microbatches = self.batch_plan.microbatches
        if self.batch_plan.weights or self.batch % (ranks * microbatches) == 0:
            return  # unequal shards can divide a batch of any size
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
    """Settings for experiments whose ranks may differ in speed or in device type."""

    can_mix_devices: ClassVar[bool] = True

    shards: list[str] = field(default_factory=lambda: ["equal"])
    """Division of each batch among the ranks. equal gives every rank the same number of samples. A list of integer
    weights, one per rank, such as [3,1], sets the shares explicitly; a rank with weight 0 gets no samples. auto chooses
    the shares by measuring the speed of each rank before the first step and during training. In all cases, the training
    result is the same as that of a single process."""
    dropout: float = between(0, 0.95, 0)
    """Dropout probability for the inputs of the last layer. The dropout mask of a sample depends only on the sample's
    position in the epoch, so the division into shards and microbatches does not change the result."""

    @property
    def batch_plan(self) -> BatchPlan:
        return BatchPlan(self.batch, self.processes, weights=self.parse_shards())

    def parse_shards(self) -> tuple[int, ...]:
        """Return the initial relative shard sizes of the ranks, or () for equal shards.

        Raises ValueError if `shards` is invalid.
        """
        ranks = self.processes
        text = ",".join(self.shards)
        if text == "equal":
            return ()
        if text == "auto":
            return (1,) * ranks
        if not self.shards or not all(weight.isdecimal() and len(weight) < 10 for weight in self.shards):
            raise ValueError(f"shards=[{text}] must be equal, auto, or one integer >= 0 per rank, such as [3,1]")
        if len(self.shards) != ranks:
            example = ",".join(["3", *["1"] * (ranks - 1)])
            raise ValueError(
                f"shards=[{text}] has length {len(self.shards)}, but there are {ranks} ranks; "
                f"specify one weight per rank, such as [{example}]"
            )
        weights = tuple(map(int, self.shards))
        if not any(weights):
            raise ValueError(f"shards=[{text}] assigns no samples to any rank; at least one weight must be positive")
        return weights

    def check(self) -> None:
        super().check()
        microbatches = self.batch_plan.microbatches
        if self.batch % microbatches:
            remedy = f"use batch={format_nearest_multiples(self.batch, microbatches)}"
            raise ValueError(f"batch={self.batch} is not divisible by accumulate={microbatches}; {remedy}")
        min_batch = self.processes * microbatches
        if self.shards == ["auto"] and self.batch < min_batch:
            raise ValueError(
                f"shards=auto requires at least one sample per rank in each microbatch (batch={self.batch}); "
                f"set batch to at least {min_batch} or use fewer ranks"
            )


@dataclass
class DataParallel(Replicated, InitialWeights):
    """Settings for DDP and for the strategies that are compared with DDP."""

    model: Literal["mlp", "convnet", "resnet18", "resnet50"] = "convnet"
    """Network to train. mlp has two hidden layers (784-128-64-10 on MNIST); convnet has two 3x3 convolutions; resnet18
    is ResNet-18 with the CIFAR stem. resnet50 has the ImageNet stem for images of 64 pixels or more. All of these
    networks accept the images of any data set."""
    sync_batchnorm: bool = False
    """Compute BatchNorm statistics over the whole batch instead of over each rank's shard."""

    def check(self) -> None:
        super().check()
        if self.sync_batchnorm and self.model in ("mlp", "convnet"):
            raise ValueError(
                f"sync_batchnorm=true requires BatchNorm layers, but model={self.model} has none; use model=resnet18"
            )
