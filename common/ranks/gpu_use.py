"""Decision whether the ranks of a host use GPUs. This module does not import torch."""

from __future__ import annotations

from configs.shared import Launch


def uses_gpus(launch: Launch, ranks: int, gpus: int) -> bool:
    """Return whether any of the ranks of a host uses a GPU. `gpus` is the number of GPUs that the host has."""
    if launch.excludes_gpus:
        return False
    return gpus > 0 if launch.mixed else gpus >= ranks
