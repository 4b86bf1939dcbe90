"""Settings that reduce the memory of a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from configs.fields import find_group

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


@dataclass(frozen=True)
class StateSharding:
    """Setting for experiments in which several ranks hold the same parameters."""

    zero1: bool = False
    """Divide the optimizer state among the ranks that hold the same parameters (ZeRO stage 1, arXiv 1910.02054). Each
    rank updates the parameters whose state it has, and sends them to the other ranks after every step. Parameters and
    gradients are not divided. The results do not change."""

    def check(self, copies: int, remedy: str) -> None:
        """Raise ValueError if the optimizer state cannot be divided.

        `copies` is the number of ranks that hold the same parameters. `remedy` names the settings that increase it.
        """
        if self.zero1 and copies == 1:
            raise ValueError(
                "zero1=true divides the optimizer state among ranks with the same parameters, but no two ranks of "
                f"this run hold the same parameters; use {remedy}, or omit zero1"
            )


def find_remedy_for_divided_updates(cfg: Any) -> str:
    """Return the settings that let every rank update all parameters, or an empty string if every rank already does.

    If ranks update different parameters, an optimizer must treat each parameter separately.
    """
    remedies = []
    settings = find_group(cfg, StateSharding)
    if settings is not None and settings.zero1:
        remedies.append("zero1=false")
    # A single rank with several devices updates the parameters of all stages.
    if hasattr(cfg, "make_pipeline_config") and min(cfg.processes, cfg.make_pipeline_config().processes) > 1:
        remedies.append("stages=1")
    return " and ".join(remedies)
