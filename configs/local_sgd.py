"""Settings of experiments/local_sgd.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.dataparallel import Replicated
from configs.optional import InitialWeights
from configs.shared import at_least, between


@dataclass
class Config(Replicated, InitialWeights):
    """Settings of local SGD."""

    model: Literal["mlp", "convnet", "resnet18"] = "convnet"
    """mlp has two hidden layers (784-128-64-10 on MNIST); convnet has two 3x3 convolutions; resnet18 has the CIFAR stem
    and BatchNorm with separate statistics per worker, which are averaged for an evaluation."""
    every: int = at_least(1, 8)
    """Optimizer steps of each worker between two exchanges. The last step of a run is also followed by an exchange."""
    start: int = at_least(0, 0)
    """Initial steps with averaged gradients, as in DDP (post-local SGD, arXiv 1808.07217)."""
    outer: Literal["mean", "nesterov"] = "mean"
    """How an exchange applies the mean change of the workers' parameters since the last exchange: as a step of SGD, or
    of SGD with Nesterov momentum (DiLoCo, arXiv 2311.08105)."""
    outer_lr: float = between(0.001, 2, 1)
    """Learning rate of the outer step. With outer=mean, 1 gives the mean of the workers' parameters."""
    outer_momentum: float = between(0, 0.9999, 0.9, only="outer=nesterov")
    """Momentum of the outer step with outer=nesterov."""
    momentum_of: Literal["own", "averaged", "reset"] = "own"
    """Momentum of a worker's optimizer at an exchange. own keeps it; averaged averages it over the workers, including
    second moments; reset clears the whole optimizer state."""
    communication: Literal["none", "bf16", "int8", "topk", "powersgd"] = "none"
    """Compression of the differences: none; bf16; int8 with a scale per parameter; only the largest values (topk); or a
    product of two low-rank matrices (arXiv 1905.13727). The compression error is added to the next difference."""
    topk: float = between(1e-6, 1, 0.01, only="communication=topk")
    """Fraction of the values that topk sends."""
    powersgd_rank: int = at_least(1, 8, only="communication=powersgd")
    """Rank of the PowerSGD matrices. Differences of several steps need a higher rank than gradients."""
    delay: int = at_least(0, 0)
    """Steps that workers take while an exchange is in progress, before its outer step (arXiv 2501.18512)."""

    def check(self) -> None:
        super().check()
        self.check_exchange()
        if self.momentum_of == "averaged" and self.optim.name == "sgd" and not self.optim.momentum:
            raise ValueError("momentum_of=averaged: optim.momentum=0 has no momentum to average; omit momentum_of")
        samples = self.data.train_samples
        if samples:
            self.check_rounds(self.total_steps(samples // self.batch))

    def check_exchange(self) -> None:
        """Raise ValueError for incompatible settings of the exchange."""
        if self.communication in ("bf16", "int8") and self.dtype == "float64":
            raise ValueError(
                f"communication={self.communication} needs dtype=float32; with float64 use none, topk or powersgd"
            )
        if self.delay >= self.every:
            raise ValueError(
                f"delay={self.delay}: an exchange must finish before the next one, after every={self.every} steps; "
                f"use at most delay={self.every - 1}"
            )
        if self.delay and self.momentum_of == "averaged":
            raise ValueError(
                f"delay={self.delay}: averaged momentum would belong to older parameters; use momentum_of=own or reset"
            )

    def check_rounds(self, steps: int) -> None:
        """Raise ValueError if a run of `steps` steps has no full round of local steps."""
        local_steps = steps - self.start
        if local_steps < 1:
            raise ValueError(
                f"start={self.start}: all {steps} steps of the run are synchronous; use start={steps // 2}"
            )
        if self.every > local_steps:
            raise ValueError(
                f"every={self.every} exceeds the {local_steps} local steps of the run; use at most every={local_steps}"
            )
