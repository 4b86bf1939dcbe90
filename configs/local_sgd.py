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
    """mlp has two hidden layers, on MNIST 784-128-64-10; convnet has two 3x3 convolutions; resnet18 has the CIFAR
    stem, and BatchNorm, whose statistics are each worker's own and are averaged for an evaluation."""
    every: int = at_least(1, 8)
    """Optimizer steps that each worker takes from one exchange to the next; the last step of a run is followed by one,
    too."""
    start: int = at_least(0, 0)
    """Steps at the beginning in which gradients are averaged, as in DDP (post-local SGD, arXiv 1808.07217)."""
    outer: Literal["mean", "nesterov"] = "mean"
    """What an exchange does with the mean difference of the workers' parameters from those of the last exchange: a
    step of SGD, or of SGD with Nesterov momentum (DiLoCo, arXiv 2311.08105)."""
    outer_lr: float = between(0.001, 2, 1)
    """Learning rate of the outer step; with outer=mean 1 gives the mean of the workers' parameters."""
    outer_momentum: float = between(0, 0.9999, 0.9, only="outer=nesterov")
    """Momentum of the outer step with outer=nesterov."""
    momentum_of: Literal["own", "averaged", "reset"] = "own"
    """Momentum of a worker's optimizer at an exchange: it stays the worker's own; is averaged over the workers,
    with second moments if there are any; or begins anew, as all of the optimizer's state does."""
    communication: Literal["none", "bf16", "int8", "topk", "powersgd"] = "none"
    """How differences are sent: as they are; in half the bits; in a quarter, with a scale for each parameter; the
    largest numbers only; or as products of thin matrices (arXiv 1905.13727). What is left out is added to the next
    difference."""
    topk: float = between(1e-6, 1, 0.01, only="communication=topk")
    """Share of the numbers that topk sends."""
    powersgd_rank: int = at_least(1, 8, only="communication=powersgd")
    """Columns of PowerSGD's matrices. Differences of several steps need more of them than gradients do."""
    delay: int = at_least(0, 0)
    """Steps that workers take on while an exchange is under way, before its outer step is taken (arXiv 2501.18512)."""

    def check(self) -> None:
        super().check()
        self.check_exchange()
        if self.momentum_of == "averaged" and self.optim.name == "sgd" and not self.optim.momentum:
            raise ValueError("momentum_of=averaged: with optim.momentum=0 there is none; leave it out")
        held = self.data.train_samples
        if held:
            self.check_rounds(self.total_steps(held // self.batch))

    def check_exchange(self) -> None:
        """Raise ValueError where settings of the exchange do not fit together."""
        if self.communication in ("bf16", "int8") and self.dtype == "float64":
            what = f"communication={self.communication} takes dtype=float32"
            raise ValueError(f"{what}; with float64 use none, topk or powersgd")
        if self.delay >= self.every:
            what = f"delay={self.delay}: an exchange must be over when the next one begins"
            raise ValueError(f"{what}, after every={self.every} steps; use at most delay={self.every - 1}")
        if self.delay and self.momentum_of == "averaged":
            what = f"delay={self.delay}: averaged momentum would be that of older parameters"
            raise ValueError(f"{what}; use momentum_of=own or reset")

    def check_rounds(self, steps: int) -> None:
        """Raise ValueError where a run of so many steps has no full round of local steps."""
        local = steps - self.start
        if local < 1:
            raise ValueError(
                f"start={self.start}: all {steps} steps of the run are synchronous; use start={steps // 2}"
            )
        if self.every > local:
            what = f"every={self.every}: the run has {local} local steps"
            raise ValueError(f"{what}, and so no round of that length; use at most every={local}")
