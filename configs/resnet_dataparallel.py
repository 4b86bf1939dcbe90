"""Settings for experiments/resnet_dataparallel.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from configs.dataparallel import Replicated, check_sync_batchnorm
from configs.fields import at_least, flat
from configs.memory import Memory, StateSharding
from configs.networks import network_field
from configs.shared import InitialWeights, Regularization, Sweep
from configs.strategies import Condition, Refusal

ONE_DEVICE_MESSAGE = (
    "GPUs found: {}; DataParallel runs the model unchanged, like strategy=single; to compare devices, use strategy=ddp"
)

NEEDS_PROCESSES = ("sync_batchnorm=true", "processes_per_node>1", "launch.nodes>1", "zero1=true")
COPIED_MODEL = "is not available with strategy=data_parallel, whose copies of the model"
REFUSED = (
    *(
        Refusal(
            condition, "strategy!=ddp",
            f"{Condition.parse(condition).setting} needs several processes, but strategy={{strategy}} uses one",
            f"use strategy=ddp, or omit {Condition.parse(condition).setting}",
        )
        for condition in NEEDS_PROCESSES
    ),
    Refusal(
        "functional=true", "strategy!=data_parallel", "functional=true applies to data_parallel only",
        "use strategy=data_parallel, or omit functional",
    ),
    Refusal(
        "dropout>0", "strategy=data_parallel",
        f"dropout={{dropout}} {COPIED_MODEL} do not know which samples of a batch they compute",
        "use strategy=ddp or single",
    ),
    Refusal(
        "recompute!=none", "strategy=data_parallel",
        f"recompute={{recompute}} {COPIED_MODEL} exist for one step only", "use strategy=ddp or single",
    ),
)  # fmt: skip
"""Combinations of settings that are refused."""


@dataclass(frozen=True)
class Config(Replicated):
    """Settings for comparing nn.DataParallel, DDP and a single device."""

    smallest_settings: ClassVar[tuple[str, ...]] = (
        "model=convnet",
        "batch=16",
        "optim.base_batch=16",
        "optim.warmup=0",
        "compare=false",
    )
    refused: ClassVar[tuple[Refusal, ...]] = REFUSED

    model: str = network_field("convnet", "mlp", "convnet", "resnet18", "resnet50")
    """Network to train. mlp has two hidden layers (784-128-64-10 on MNIST); convnet has two 3x3 convolutions; resnet18
    is ResNet-18 with the CIFAR stem. resnet50 has the ImageNet stem for images of 64 pixels or more. All of these
    networks accept the images of any data set. FILE.py:Class is a custom network."""
    strategy: Literal["single", "data_parallel", "ddp"] = "ddp"
    """single uses one process on one device. data_parallel is nn.DataParallel: one process copies the model to all of
    its GPUs in every step. ddp is DistributedDataParallel, with one process per device."""
    sync_batchnorm: bool = False
    """Compute BatchNorm statistics over the whole batch instead of over each rank's shard."""
    functional: bool = False
    """Use the function nn.parallel.data_parallel instead of the class nn.DataParallel."""
    last_batch: Literal["keep", "drop"] = "keep"
    """Whether to keep or drop the last partial batch of an epoch, which may have fewer samples than there are
    devices."""
    loss_every: int = at_least(1, 100)
    """Number of steps between two log messages with the running loss."""
    compare: bool = True
    """After training on several devices, time the same step on a single device and with the other strategies, in
    alternating rounds. A sweep trains a separate run with each strategy instead."""
    regularization: Regularization = flat(Regularization)
    initial: InitialWeights = flat(InitialWeights)
    memory: Memory = flat(Memory)
    state_sharding: StateSharding = flat(StateSharding)
    grid: Sweep = flat(Sweep)

    @property
    def processes(self) -> int:
        return super().processes if self.strategy == "ddp" else 1

    def check(self) -> None:
        super().check()
        self.state_sharding.check(self.processes, "processes_per_node=2 or more")
        check_sync_batchnorm(self.sync_batchnorm, self.model)
        self.memory.check(self.model)
