"""Settings that reduce the memory of a training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NETWORKS_WITHOUT_BLOCKS = ("mlp", "convnet", "toy")


@dataclass(frozen=True)
class Memory:
    """Settings that reduce the memory of a training step."""

    recompute: Literal["none", "blocks", "selective"] = "none"
    """Which activations are not kept for the backward pass, but computed again (activation checkpointing, arXiv
    1604.06174). blocks keeps only the input of each block. selective also keeps the results of matrix products,
    convolutions and attention in the blocks. The blocks are the transformer blocks of gpt and the residual blocks of a
    ResNet. A custom network has an attribute `blocks`, or is an nn.Sequential, whose blocks are its children that
    contain other layers. The gradients do not change."""

    def check(self, model: str) -> None:
        """Raise ValueError if a built-in network has no blocks."""
        if self.recompute != "none" and model in NETWORKS_WITHOUT_BLOCKS:
            raise ValueError(
                f"recompute={self.recompute} needs a network with blocks, but model={model} has none; "
                "omit recompute, or use another network, such as model=resnet18"
            )
