"""Operations whose results selective recomputation keeps, because computing them again takes long."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten
KEPT_OPERATIONS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}
"""Matrix products, convolutions and attention."""


def is_kept(operation: Any) -> bool:
    """Return whether the result of an operation is kept.

    Functions with a backward pass of their own compute without gradients. They may change results in place, so their
    results are not kept.
    """
    return operation in KEPT_OPERATIONS and torch.is_grad_enabled()


def choose_policy(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Return whether torch keeps the result of an operation for the backward pass."""
    return CheckpointPolicy.MUST_SAVE if is_kept(operation) else CheckpointPolicy.PREFER_RECOMPUTE
