"""Settings for experiments/local_sgd.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from configs.dataparallel import Replicated
from configs.fields import at_least, between, flat
from configs.networks import network_field
from configs.shared import InitialWeights, Regularization


@dataclass(frozen=True)
class Config(Replicated):
    """Settings for local SGD."""

    ranks_have_separate_models: ClassVar[bool] = True
    smallest_settings: ClassVar[tuple[str, ...]] = ("every=2", "batch=16", "optim.base_batch=16", "optim.warmup=0")

    model: str = network_field("convnet", "mlp", "convnet", "resnet18")
    """Network to train. mlp has two hidden layers (784-128-64-10 on MNIST); convnet has two 3x3 convolutions. resnet18
    has the CIFAR stem; each worker has its own BatchNorm statistics, which are averaged for evaluation.
    FILE.py:Class is a custom network."""
    every: int = at_least(1, 8)
    """Number of optimizer steps that each worker takes between two exchanges. The workers also exchange after the last
    step of a run."""
    start: int = at_least(0, 0)
    """Number of initial steps in which gradients are averaged, as in DDP (post-local SGD, arXiv 1808.07217)."""
    outer: Literal["mean", "nesterov"] = "mean"
    """Outer optimizer, which applies the mean change of the workers' parameters since the last exchange. mean takes a
    plain SGD step; nesterov takes an SGD step with Nesterov momentum (DiLoCo, arXiv 2311.08105)."""
    outer_lr: float = between(0.001, 2, 1)
    """Learning rate of the outer step. With outer=mean, a rate of 1 yields the mean of the workers' parameters."""
    outer_momentum: float = between(0, 0.9999, 0.9, only="outer=nesterov")
    """Momentum of the outer step, for outer=nesterov."""
    momentum_of: Literal["own", "averaged", "reset"] = "own"
    """How an exchange changes the momentum of each worker's optimizer. own keeps the momentum; averaged averages the
    momentum over the workers, including second moments; reset clears the whole optimizer state."""
    communication: Literal["none", "bf16", "int8", "topk", "powersgd"] = "none"
    """Compression of the parameter differences that workers exchange. int8 uses one scale per parameter tensor; topk
    sends only the largest values; powersgd sends two low-rank matrices whose product approximates a difference (arXiv
    1905.13727). The compression error is added to the next difference."""
    topk: float = between(1e-6, 1, 0.01, only="communication=topk")
    """Fraction of the values that communication=topk sends."""
    powersgd_rank: int = at_least(1, 8, only="communication=powersgd")
    """Rank of PowerSGD's low-rank matrices. Differences accumulated over several steps need a higher rank than
    gradients."""
    delay: int = at_least(0, 0)
    """Number of steps that workers take during an exchange, before the outer step is applied (arXiv 2501.18512)."""
    regularization: Regularization = flat(Regularization)
    initial: InitialWeights = flat(InitialWeights)

    def check(self) -> None:
        super().check()
        self.check_exchange()
        if self.momentum_of == "averaged" and self.optim.name == "sgd" and not self.optim.momentum:
            raise ValueError("momentum_of=averaged requires optim.momentum > 0; set optim.momentum or omit momentum_of")
        samples = self.data.train_samples
        if samples:
            self.check_rounds(self.compute_total_steps(samples // self.batch))

    def check_exchange(self) -> None:
        """Raise ValueError if settings of the exchange are incompatible."""
        if self.communication in ("bf16", "int8") and self.dtype == "float64":
            raise ValueError(
                f"communication={self.communication} needs dtype=float32; with float64, use none, topk or powersgd"
            )
        if self.delay >= self.every:
            raise ValueError(
                f"delay={self.delay} must be less than every={self.every}, because an exchange must finish before the "
                f"next one begins; use at most delay={self.every - 1}"
            )
        if self.delay and self.momentum_of == "averaged":
            raise ValueError(
                f"delay={self.delay} cannot be combined with momentum_of=averaged, because the averaged momentum would "
                "belong to older parameters; use momentum_of=own or reset"
            )

    def check_rounds(self, steps: int) -> None:
        """Raise ValueError if `steps` steps are too few for a full round of local steps."""
        local_steps = steps - self.start
        if local_steps < 1:
            remedy = f"use start={max(0, steps - self.every)}"
            if self.every > steps:
                remedy += f" every={steps}"
            if self.delay >= steps:
                remedy += f" delay={steps - 1}"
            raise ValueError(f"start={self.start} makes all {steps} steps of the run synchronous; {remedy}")
        if self.every > local_steps:
            remedy = f"use at most every={local_steps}"
            if self.delay >= local_steps:
                remedy += f" and delay={local_steps - 1}"
            raise ValueError(f"every={self.every} exceeds the {local_steps} local steps of the run; {remedy}")
