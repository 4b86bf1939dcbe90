"""Weighted means of tensors and buffers over the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


@torch.no_grad()
def average_buffers(model: nn.Module, group: dist.ProcessGroup | None = None, weight: float = 1.0) -> None:
    """Average the floating-point buffers of a model over the ranks of a group.

    All ranks of the group must call this function. `weight` is the weight of this rank: 1 for an unweighted mean, or
    `Loader.weight` if the ranks have data shards of different sizes.
    """
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    average_tensors(buffers, group, weight)


@torch.no_grad()
def average_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None, weight: float = 1.0) -> None:
    """Replace tensors by their weighted means over the ranks of a group, in one all-reduce.

    All tensors must have the same dtype. The mean of the weights of all ranks must be 1.
    """
    if not tensors or dist.get_world_size(group) == 1:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    flat = flat * weight if weight else torch.zeros_like(flat)  # infinity times 0 would be NaN
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    means = flat.split([tensor.numel() for tensor in tensors])
    for tensor, mean in zip(tensors, means, strict=True):
        tensor.copy_(mean.view_as(tensor))
