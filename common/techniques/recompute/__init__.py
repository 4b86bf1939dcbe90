"""Recomputation of activations, also called activation checkpointing (Chen et al. 2016, arXiv 1604.06174).

`recompute_blocks` lets the blocks of a network discard their activations in the forward pass and compute them again in
the backward pass. `blocks` contains the forward pass of such a block, `forward_state` what a second forward pass must
restore, and `kept_operations` the operations whose results selective recomputation keeps.
"""

from __future__ import annotations

from torch import nn


def recompute_blocks(network: nn.Module, recompute: str) -> None:
    """Let the blocks of a network recompute their activations, as the setting `recompute` states.

    Call this function before the network is wrapped or divided among ranks. Parameters keep their names. Raises
    UserError if the network has no blocks.
    """
    if recompute != "none":
        from common.techniques.recompute import blocks  # imported here because few runs recompute

        blocks.change_blocks(network, recompute)
