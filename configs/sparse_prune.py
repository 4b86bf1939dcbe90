"""Settings of experiments/sparse_prune.py."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Literal

from configs.dataparallel import Replicated
from configs.optional import Sweep
from configs.shared import at_least, between

CRITERIA = ("magnitude", "gradient", "taylor", "random")


@dataclass
class Config(Sweep, Replicated):
    """Settings of pruning."""

    model: Literal["lenet300", "lenet5", "mlp", "convnet", "resnet18"] = "lenet300"
    """lenet300 is LeNet-300-100; mlp is the 784-128-64-10 network on MNIST; lenet5 has two 5x5 convolutions and 500
    units, convnet two 3x3 convolutions and 100 units; resnet18 has the CIFAR stem."""
    processes_per_node: int = at_least(1, 1)
    """Ranks per host. They divide each batch and average their gradients."""
    criterion: Literal["magnitude", "gradient", "taylor", "random"] = "magnitude"
    """Score of a weight w with gradient g: |w| (arXiv 1506.02626), |g|, |w g| (arXiv 1906.10771), or random. Gradients
    are those of `score_batches`."""
    normalize: Literal["none", "layer"] = "none"
    """layer divides scores by the root mean square of their layer before layers are compared."""
    scope: Literal["global", "layer", "structured", "n:m"] = "global"
    """Groups of weights within which the lowest scores are pruned: all weights; each layer; whole channels (or units)
    of each layer except the last; groups of m consecutive weights in a row of a layer's matrix, by `pattern`."""
    pattern: str = "2:4"
    """n:m keeps n of every m weights; the sparse tensor cores of NVIDIA GPUs support 2:4."""
    schedule: Literal["none", "oneshot", "iterative", "cubic", "rigl"] = "cubic"
    """none trains a dense model; oneshot prunes once, at `begin`; iterative prunes an equal fraction of the remaining
    weights in each of `rounds`; cubic (arXiv 1710.01878) prunes quickly at first, then ever more slowly; rigl (arXiv
    1911.11134) is sparse from the first step to the last and replaces the smallest weights by those with the largest
    gradients."""
    sparsity: float = between(0, 0.9999, 0.92)
    """Final fraction of zero weights (in layers, without biases and norms); with structured, of zero channels."""
    begin: float = between(0, 1, 0.1)
    """Fraction of all steps before the first pruning; rigl is sparse from the start."""
    end: float = between(0, 1, 0.6)
    """Fraction of all steps after which masks stay fixed and the model is fine-tuned. Not used by oneshot."""
    rounds: int = between(1, 1000, 5)
    """Number of prunings of the iterative schedule."""
    every: int = at_least(1, 50)
    """Steps between two updates of the masks, with cubic and rigl."""
    drop: float = between(0, 1, 0.3)
    """Initial fraction of the weights of each layer that rigl replaces; it decays to zero by a cosine."""
    score_batches: int = between(1, 10_000, 8)
    """Number of batches whose gradients are scored, for gradient and taylor."""
    l1: float = between(0, 10, 0)
    """Strength of the L1 penalty: after each step weights move towards zero by the learning rate times this value, and
    stop at zero. This creates exact zeros without masks."""
    int8: bool = True
    """At the end, quantise the model to int8 with torchao and report its accuracy and size."""
    export: bool = True
    """At the end, write the model with torch.export and run it in a process that does not import this project."""

    levels: list[str] = field(default_factory=lambda: ["0.8", "0.92", "0.97", "0.99"])
    """Sparsities with sweep=true."""
    criteria: list[str] = field(default_factory=lambda: list(CRITERIA))
    """Criteria with sweep=true."""

    def parse_pattern(self) -> tuple[int, int]:
        """Return n and m of `pattern`. Raises ValueError."""
        count, _, size = self.pattern.partition(":")
        if not (count.isdecimal() and size.isdecimal() and 0 < int(count) < int(size) <= 64):
            raise ValueError(f"pattern={self.pattern}: expected n:m with 0 < n < m <= 64, such as 2:4")
        return int(count), int(size)

    def check(self) -> None:
        super().check()
        if self.model == "lenet5" and self.data.name in ("generated", "imagefolder") and self.data.image_size < 16:
            raise ValueError(f"data.image_size={self.data.image_size}: model=lenet5 needs 16 pixels; use 16 or more")
        if self.normalize == "layer" and self.scope != "global":
            raise ValueError(f"normalize=layer: scope={self.scope} does not compare layers; use scope=global")
        if self.sweep and self.schedule == "none":
            raise ValueError("sweep=true: schedule=none prunes nothing; use another schedule")
        if self.schedule in ("iterative", "cubic") and self.begin >= self.end:
            raise ValueError(f"begin={self.begin:g} is not before end={self.end:g}; lower begin or raise end")
        self.check_pattern()
        invalid = [name for name in self.criteria if name not in CRITERIA]
        if invalid or not self.criteria:
            raise ValueError(f"criteria=[{','.join(invalid)}]: use one or more of {', '.join(CRITERIA)}")
        if not self.levels or not all(re.fullmatch(r"0(\.\d{1,4})?", level) for level in self.levels):
            raise ValueError(f"levels=[{','.join(self.levels)}]: use sparsities below 1, such as levels=[0.9,0.95]")
        if self.schedule == "rigl" and self.scope in ("structured", "n:m"):
            raise ValueError(f"scope={self.scope}: rigl replaces single weights; use scope=global or scope=layer")
        if self.schedule == "rigl" and self.criterion != "magnitude":
            raise ValueError(
                f"criterion={self.criterion}: rigl drops by magnitude and grows by gradient; use criterion=magnitude"
            )

    def check_pattern(self) -> None:
        """Raise ValueError if `pattern` is invalid or implies another sparsity."""
        count, size = self.parse_pattern()
        sparsity = 1 - count / size
        if self.scope != "n:m" or self.schedule == "none" or math.isclose(self.sparsity, sparsity, abs_tol=1e-5):
            return
        raise ValueError(
            f"sparsity={self.sparsity:g}: pattern={self.pattern} prunes exactly {sparsity:g}; "
            f"use sparsity={sparsity:g}, or another pattern"
        )
