"""Settings for experiments/ddp_multinode.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from configs.batch_plan import BatchPlan, list_divisors
from configs.dataparallel import Elastic, Replicated, Sharding, check_sync_batchnorm
from configs.fields import at_least, between, flat
from configs.memory import Memory, StateSharding
from configs.networks import network_field
from configs.shared import InitialWeights, Regularization
from configs.strategies import Refusal, Strategies

STRATEGIES = Strategies(
    degrees={
        "processes_per_node": (
            {"strategy": "ddp"},
            {"zero1": "true"},
            {"strategy": "fsdp"},
            {"strategy": "fsdp", "reshard": "false"},
            {"strategy": "fsdp", "fsdp": "2"},
            {"communication": "fp16"},
            {"communication": "bf16"},
            {"communication": "powersgd"},
        ),
    },
    options=({}, {"recompute": "blocks"}),
    # ResNet-18 has blocks that can be recomputed. All strategies use the BatchNorm statistics of the whole batch, so
    # that the losses are equal. PowerSGD sends whole gradients in the first nine steps. With a larger learning
    # rate, differences by rounding grow faster.
    run={
        "model": "resnet18",
        "sync_batchnorm": "true",
        "data.name": "generated",
        "data.image_size": "16",
        "data.samples": "1280",
        "data.test_limit": "64",
        "batch": "32",
        "steps": "18",
        "log.memory": "12",
        "optim.lr": "0.002",
    },
)
DDP_ONLY = "use strategy=ddp or omit"
STATE_LOST = "because losing a rank would lose part of the state"
WAITING = "because ranks then wait for each other within a step"
EXPLICIT_SHARDS = "set shards explicitly, such as shards=[3,1], or omit"
REFUSED = (
    Refusal(
        "elastic.on=true", "strategy=fsdp", f"elastic=true cannot be combined with strategy=fsdp, {STATE_LOST}",
        "omit strategy=fsdp",
    ),
    Refusal(
        "elastic.on=true", "communication=powersgd",
        f"elastic=true cannot be combined with communication=powersgd, {STATE_LOST}", "omit communication=powersgd",
    ),
    Refusal(
        "elastic.on=true", "zero1=true", f"elastic=true cannot be combined with zero1=true, {STATE_LOST}",
        "omit zero1=true",
    ),
    Refusal(
        "shards=auto", "find_unused_parameters=true",
        "shards=auto measures the time until the last gradient, which is unknown if parameters are unused",
        "set the shards, such as shards=[1,3], or omit find_unused_parameters",
    ),
    Refusal("strategy=fsdp", "zero1=true", "zero1 applies to DDP only", f"{DDP_ONLY} zero1"),
    Refusal("strategy=fsdp", "static_graph=true", "static_graph applies to DDP only", f"{DDP_ONLY} static_graph"),
    Refusal(
        "strategy=fsdp", "find_unused_parameters=true", "find_unused_parameters applies to DDP only",
        f"{DDP_ONLY} find_unused_parameters",
    ),
    Refusal("strategy=fsdp", "communication!=none", "communication applies to DDP only", f"{DDP_ONLY} communication"),
    Refusal(
        "strategy=fsdp", "launch.mixed=true",
        "launch.mixed=true cannot be combined with strategy=fsdp, which requires devices of one type",
        "use strategy=ddp",
    ),
    Refusal(
        "shards=auto", "strategy=fsdp",
        f"shards=auto cannot measure the speed of each rank with strategy=fsdp, {WAITING}",
        f"{EXPLICIT_SHARDS} strategy=fsdp",
    ),
    Refusal(
        "shards=auto", "sync_batchnorm=true",
        f"shards=auto cannot measure the speed of each rank with sync_batchnorm=true, {WAITING}",
        f"{EXPLICIT_SHARDS} sync_batchnorm=true",
    ),
)  # fmt: skip
"""Combinations of settings that are refused."""


@dataclass(frozen=True)
class Config(Replicated):
    """Settings for training with DDP or FSDP2."""

    can_mix_devices: ClassVar[bool] = True
    smallest_settings: ClassVar[tuple[str, ...]] = ("batch=16", "optim.base_batch=16", "optim.warmup=0")
    strategies: ClassVar[Strategies] = STRATEGIES
    refused: ClassVar[tuple[Refusal, ...]] = REFUSED

    model: str = network_field("convnet", "mlp", "convnet", "resnet18", "resnet50")
    """Network to train. mlp has two hidden layers (784-128-64-10 on MNIST); convnet has two 3x3 convolutions; resnet18
    is ResNet-18 with the CIFAR stem. resnet50 has the ImageNet stem for images of 64 pixels or more. All of these
    networks accept the images of any data set. FILE.py:Class is a custom network."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """ddp keeps the whole model on every rank; fsdp (fully_shard) shards every parameter across the ranks."""
    fsdp: int = between(0, 64, 0, only="strategy=fsdp")
    """Number of ranks among which parameters, gradients and optimizer states are divided. 0 uses all ranks. With fewer
    ranks than the run has, there are several replicas of the model (hybrid sharding): the parameters are gathered
    within a replica, and the gradients are averaged over all of them."""
    reshard: bool = field(default=True, metadata={"only": "strategy=fsdp"})
    """Free the gathered parameters of a layer after its forward pass, and gather them again for its backward pass.
    false keeps them, which needs more memory and less communication."""
    communication: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """Compression of the gradients that DDP all-reduces. fp16 and bf16 send gradients in half precision; powersgd sends
    two low-rank matrices whose product approximates a gradient (arXiv 1905.13727)."""
    powersgd_rank: int = at_least(1, 2, only="communication=powersgd")
    """Rank of PowerSGD's low-rank matrices. Compression starts in step 10."""
    bucket_mb: float = between(0.01, 10_000, 25)
    """Size of DDP's gradient buckets in MB. A bucket is all-reduced as soon as the backward pass has filled the
    bucket."""
    gradient_as_bucket_view: bool = True
    """Use views of DDP's buckets as gradients, which saves memory and a copy."""
    static_graph: bool = False
    """Declare to DDP that every step uses the same parameters in the same order."""
    find_unused_parameters: bool = False
    """In every step, let DDP search for parameters that get no gradient. The search takes time. Only models that do not
    use all of their parameters in every step need the search."""
    sync_batchnorm: bool = False
    """Compute BatchNorm statistics over the whole batch instead of over each rank's shard."""
    compare: bool = False
    """After training, time the same step in a single process and report the parallel efficiency."""
    regularization: Regularization = flat(Regularization)
    sharding: Sharding = flat(Sharding)
    elastic: Elastic = field(default_factory=Elastic)
    initial: InitialWeights = flat(InitialWeights)
    memory: Memory = flat(Memory)
    state_sharding: StateSharding = flat(StateSharding)

    @property
    def accepts_scalar_parameters(self) -> bool:
        """Whether a custom network may have parameters with the shape []."""
        return self.strategy != "fsdp" and self.communication != "powersgd"

    @property
    def batch_plan(self) -> BatchPlan:
        return BatchPlan(self.batch, self.processes, weights=self.sharding.parse_weights(self.processes))

    @property
    def replicas_per_host(self) -> float:
        shards = self.fsdp or self.processes
        return super().replicas_per_host / (shards if self.strategy == "fsdp" else 1)

    def check(self) -> None:
        super().check()
        check_sync_batchnorm(self.sync_batchnorm, self.model)
        self.memory.check(self.model)
        self.sharding.check(self.batch_plan)
        self.elastic.check(self.processes, self.launch, self.sharding)
        self.state_sharding.check(self.processes, "processes_per_node=2 or more")
        if self.strategy == "fsdp":
            self.check_fsdp()

    def check_fsdp(self) -> None:
        """Raise ValueError if the ranks cannot be divided into groups that hold all parameters."""
        ranks = self.processes
        if self.fsdp == 1 < ranks:
            raise ValueError("fsdp=1 divides no parameters; use fsdp=2 or more, fsdp=0 for all ranks, or strategy=ddp")
        if self.fsdp > 1 == ranks:
            problem = f"fsdp={self.fsdp} divides the parameters among several ranks, but the run has one"
            raise ValueError(f"{problem}; use processes_per_node={self.fsdp}, or fsdp=0")
        if self.fsdp and ranks % self.fsdp:
            valid = " or ".join(str(divisor) for divisor in list_divisors(ranks)[1:])
            raise ValueError(f"the {ranks} ranks cannot be divided evenly by fsdp={self.fsdp}; use fsdp={valid}")
