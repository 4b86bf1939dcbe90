"""What other techniques may know of recomputation."""

from __future__ import annotations

from torch import nn

from common.techniques.recompute import recompute_blocks
from common.techniques.recompute.blocks import RecomputedModule

__all__ = ["list_recomputed_blocks", "recompute_blocks"]


def list_recomputed_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model whose forward pass is computed again in the backward pass."""
    return [module for module in model.modules() if isinstance(module, RecomputedModule)]
