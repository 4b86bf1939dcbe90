"""Settings that reduce the memory of a rank."""

from __future__ import annotations

from dataclasses import dataclass

from configs.fields import find_group


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
                "zero1=true divides the optimizer state among ranks with the same parameters, but no two ranks of this "
                f"run have the same ones; use {remedy}, or omit zero1"
            )


def divides_updates(cfg: object) -> bool:
    """Return True if ranks update different parameters, so that an optimizer must treat each parameter separately."""
    settings = find_group(cfg, StateSharding)
    return settings is not None and settings.zero1
