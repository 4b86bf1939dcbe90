"""Settings for experiments/sparse_prune.py."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from configs.dataparallel import Replicated
from configs.fields import at_least, between, flat
from configs.networks import network_field
from configs.shared import Regularization, Sweep

CRITERIA = ("magnitude", "gradient", "taylor", "random")


@dataclass(frozen=True)
class Config(Replicated):
    """Settings for pruning."""

    smallest_settings: ClassVar[tuple[str, ...]] = (
        "batch=16",
        "optim.warmup=0",
        "every=5",
        "export=false",
        "int8=false",
    )

    model: str = network_field("lenet300", "lenet300", "lenet5", "mlp", "convnet", "resnet18")
    """Network to train and prune. lenet300 is LeNet-300-100; mlp is the 784-128-64-10 network (on MNIST). lenet5 has
    two 5x5 convolutions and a layer of 500 units; convnet has two 3x3 convolutions and a layer of 100 units. resnet18
    has the CIFAR stem. FILE.py:Class is a custom network, whose linear layers and convolutions are pruned."""
    criterion: Literal["magnitude", "gradient", "taylor", "random"] = "magnitude"
    """Score of a weight w with gradient g. magnitude is |w| (arXiv 1506.02626), gradient is |g|, taylor is |w g| (arXiv
    1906.10771), and random is a random number. The gradients are computed for `score_batches` batches."""
    normalize: Literal["none", "layer"] = "none"
    """Normalization of scores before layers are compared. layer divides the scores of each layer by their root mean
    square."""
    scope: Literal["global", "layer", "structured", "n:m"] = "global"
    """Groups of weights within which the weights with the lowest scores are pruned. global compares all weights; layer
    compares the weights of each layer; structured prunes whole channels (or units) of each layer except the last; n:m
    compares groups of m consecutive weights in a row of a layer's matrix, according to `pattern`."""
    pattern: str = "2:4"
    """Pattern for scope=n:m, which keeps n of every m weights. The sparse tensor cores of NVIDIA GPUs support 2:4."""
    schedule: Literal["none", "oneshot", "iterative", "cubic", "rigl"] = "cubic"
    """Pruning schedule. none trains a dense model. oneshot prunes once, at `begin`. iterative prunes an equal fraction
    of the remaining weights in each of `rounds` rounds. cubic (arXiv 1710.01878) prunes quickly at first and then at a
    decreasing rate. rigl (arXiv 1911.11134) is sparse from the first step to the last and replaces the smallest weights
    with the weights that have the largest gradients."""
    sparsity: float = between(0, 0.9999, 0.92)
    """Final fraction of the layers' weights that are zero; biases and normalization layers are not counted. With
    scope=structured, `sparsity` is the fraction of channels that are zero."""
    begin: float = between(0, 1, 0.1)
    """Fraction of all steps before the first pruning. schedule=rigl ignores `begin`, because the model is sparse from
    the start."""
    end: float = between(0, 1, 0.6)
    """Fraction of all steps after which the masks are fixed and the model is fine-tuned. schedule=oneshot ignores
    `end`."""
    rounds: int = between(1, 1000, 5)
    """Number of pruning rounds of the iterative schedule."""
    every: int = at_least(1, 50)
    """Number of steps between two updates of the masks, for schedule=cubic and schedule=rigl."""
    drop: float = between(0, 1, 0.3)
    """Initial fraction of each layer's weights that rigl replaces in an update. The fraction decays to zero along a
    cosine."""
    score_batches: int = between(1, 10_000, 8)
    """Number of batches whose gradients determine the scores, for criterion=gradient and criterion=taylor."""
    l1: float = between(0, 10, 0)
    """Strength of the L1 penalty. After each step, every weight moves toward zero by the learning rate times `l1` and
    stops at zero. The penalty creates exact zeros without masks."""
    int8: bool = True
    """After training, quantize the model to int8 with torchao, and report the accuracy and size of the int8 model."""
    export: bool = True
    """After training, export the model with torch.export and run it in a process that does not import this project."""
    regularization: Regularization = flat(Regularization)
    grid: Sweep = flat(Sweep)
    levels: list[str] = field(default_factory=lambda: ["0.8", "0.92", "0.97", "0.99"])
    """Sparsities to measure in a sweep (sweep=true)."""
    criteria: list[str] = field(default_factory=lambda: list(CRITERIA))
    """Pruning criteria to measure in a sweep (sweep=true)."""

    def parse_pattern(self) -> tuple[int, int]:
        """Return n and m of `pattern`. Raises ValueError if the pattern is invalid."""
        count, _, size = self.pattern.partition(":")
        if not (count.isdecimal() and size.isdecimal() and 0 < int(count) < int(size) <= 64):
            raise ValueError(f"pattern={self.pattern}: expected n:m with 0 < n < m <= 64, such as 2:4")
        return int(count), int(size)

    def check(self) -> None:
        super().check()
        if self.model == "lenet5" and self.data.name in ("generated", "imagefolder") and self.data.image_size < 16:
            raise ValueError(f"data.image_size={self.data.image_size} is too small for model=lenet5; use 16 or more")
        if self.normalize == "layer" and self.scope != "global":
            raise ValueError(
                f"normalize=layer has no effect with scope={self.scope}, which does not compare layers; "
                "use scope=global"
            )
        if self.grid.sweep and self.schedule == "none":
            raise ValueError("sweep=true requires pruning, but schedule=none prunes nothing; use another schedule")
        if self.schedule in ("iterative", "cubic") and self.begin >= self.end:
            raise ValueError(f"begin={self.begin:g} must be less than end={self.end:g}; lower begin or raise end")
        self.check_pattern()
        invalid = [name for name in self.criteria if name not in CRITERIA]
        if invalid or not self.criteria:
            raise ValueError(f"criteria=[{','.join(invalid)}] is invalid; use one or more of {', '.join(CRITERIA)}")
        if not self.levels or not all(re.fullmatch(r"0(\.\d{1,4})?", level) for level in self.levels):
            raise ValueError(f"levels=[{','.join(self.levels)}] must list sparsities below 1, such as [0.9,0.95]")
        if self.schedule == "rigl" and self.scope in ("structured", "n:m"):
            raise ValueError(
                f"scope={self.scope} is not available with schedule=rigl, which replaces individual weights; "
                "use scope=global or scope=layer"
            )
        if self.schedule == "rigl" and self.criterion != "magnitude":
            raise ValueError(
                f"criterion={self.criterion} is not available with schedule=rigl, which drops weights by magnitude and "
                "grows weights by gradient; use criterion=magnitude"
            )

    def check_pattern(self) -> None:
        """Raise ValueError if `pattern` is invalid or does not match `sparsity`."""
        count, size = self.parse_pattern()
        sparsity = 1 - count / size
        if self.scope != "n:m" or self.schedule == "none" or math.isclose(self.sparsity, sparsity, abs_tol=1e-5):
            return
        raise ValueError(
            f"sparsity={self.sparsity:g} does not match pattern={self.pattern}, which prunes exactly {sparsity:g}; "
            f"use sparsity={sparsity:g} or another pattern"
        )
