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
    """lenet300 is LeNet-300-100 and mlp, on MNIST, the 784-128-64-10 network; lenet5 has two 5x5 convolutions and 500
    units, convnet two 3x3 convolutions and 100 units; resnet18 has the CIFAR stem."""
    processes_per_node: int = at_least(1, 1)
    """Ranks on each host, which share each batch and average their gradients."""
    criterion: Literal["magnitude", "gradient", "taylor", "random"] = "magnitude"
    """What a weight w with gradient g is worth: |w| (arXiv 1506.02626), |g|, |w g| (arXiv 1906.10771), or chance.
    Gradients are those of `score_batches`."""
    normalize: Literal["none", "layer"] = "none"
    """layer divides scores by their layer's root mean square before layers are compared."""
    scope: Literal["global", "layer", "structured", "n:m"] = "global"
    """Among which weights the least worth ones are chosen: all; each layer's; whole channels (or units) of each layer
    but the last; n of each m that follow each other in a row of a layer's matrix, as `pattern` says."""
    pattern: str = "2:4"
    """How many of how many weights n:m leaves; 2:4 is what NVIDIA's sparse tensor cores compute."""
    schedule: Literal["none", "oneshot", "iterative", "cubic", "rigl"] = "cubic"
    """none trains a dense model; oneshot prunes once, at `begin`; iterative in `rounds` equal parts of what is left;
    cubic (arXiv 1710.01878) fast at first and slower and slower; rigl (arXiv 1911.11134) is sparse from the first
    step to the last, and exchanges weights: the smallest go, those with the largest gradients come."""
    sparsity: float = between(0, 0.9999, 0.92)
    """Share of the weights (of layers, not biases and norms) that are zero in the end; of channels if structured."""
    begin: float = between(0, 1, 0.1)
    """Share of all steps before the first pruning; rigl begins at once."""
    end: float = between(0, 1, 0.6)
    """Share of all steps after which masks stay: the rest is fine-tuning. oneshot has no use for it."""
    rounds: int = between(1, 1000, 5)
    """Prunings of iterative."""
    every: int = at_least(1, 50)
    """Steps between two changes of the masks, with cubic and rigl."""
    drop: float = between(0, 1, 0.3)
    """Share of each layer's weights that rigl exchanges at first; it falls to nothing by a cosine."""
    score_batches: int = between(1, 10_000, 8)
    """Batches whose gradients are scored, for gradient and taylor."""
    l1: float = between(0, 10, 0)
    """Strength of the L1 penalty: after each step weights move towards zero by the learning rate times this, and stop
    there, which makes exact zeros without any mask."""
    int8: bool = True
    """At the end, quantise the model to int8 with torchao, and report accuracy and size."""
    export: bool = True
    """At the end, write the model with torch.export, and let a process that knows nothing of this project run it."""

    levels: list[str] = field(default_factory=lambda: ["0.8", "0.92", "0.97", "0.99"])
    """With sweep=true, the sparsities."""
    criteria: list[str] = field(default_factory=lambda: list(CRITERIA))
    """With sweep=true, the criteria."""

    def parse_pattern(self) -> tuple[int, int]:
        """Return n and m of `pattern`. Raises ValueError."""
        left, _, size = self.pattern.partition(":")
        if not (left.isdecimal() and size.isdecimal() and 0 < int(left) < int(size) <= 64):
            raise ValueError(f"pattern={self.pattern}: write n:m with 0 < n < m <= 64, such as 2:4")
        return int(left), int(size)

    def check(self) -> None:
        super().check()
        if self.model == "lenet5" and self.data.name in ("generated", "imagefolder") and self.data.image_size < 16:
            raise ValueError(f"data.image_size={self.data.image_size}: model=lenet5 needs 16 pixels; use 16 or more")
        if self.normalize == "layer" and self.scope != "global":
            raise ValueError(f"normalize=layer: scope={self.scope} does not compare layers; use scope=global")
        if self.sweep and self.schedule == "none":
            raise ValueError("sweep=true: schedule=none prunes nothing; use another schedule")
        if self.schedule in ("iterative", "cubic") and self.begin >= self.end:
            raise ValueError(f"begin={self.begin:g} is not before end={self.end:g}; lower begin, or raise end")
        left, size = self.parse_pattern()
        exact, masked = 1 - left / size, self.scope == "n:m" and self.schedule != "none"
        if masked and not math.isclose(self.sparsity, exact, abs_tol=1e-5):
            what = f"sparsity={self.sparsity:g}: pattern={self.pattern} prunes exactly {exact:g}"
            raise ValueError(f"{what}; use sparsity={exact:g}, or another pattern")
        wrong = [name for name in self.criteria if name not in CRITERIA]
        if wrong or not self.criteria:
            raise ValueError(f"criteria=[{','.join(wrong)}]: use some of {', '.join(CRITERIA)}")
        if not self.levels or not all(re.fullmatch(r"0(\.\d{1,4})?", level) for level in self.levels):
            raise ValueError(f"levels=[{','.join(self.levels)}]: write sparsities below 1, such as levels=[0.9,0.95]")
        if self.schedule == "rigl" and self.scope in ("structured", "n:m"):
            raise ValueError(f"scope={self.scope}: rigl exchanges single weights; use scope=global or scope=layer")
        if self.schedule == "rigl" and self.criterion != "magnitude":
            what = f"criterion={self.criterion}: rigl drops by magnitude and grows by gradient"
            raise ValueError(f"{what}; use criterion=magnitude")
