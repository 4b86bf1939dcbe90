"""The data-parallel dimensions of a mesh: sharded parameters (fsdp), and replicas."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from common.models.gpt import GPT
from configs.layout import Layout

DATA_DIMS = ("replicas", "fsdp")
"""Names of the mesh dimensions whose ranks process different samples."""


def shard_parameters(model: GPT, mesh: DeviceMesh, layout: Layout) -> None:
    """Divide all parameters among the ranks of the dimension `fsdp` (FSDP2; Zhao et al. 2023, arXiv 2304.11277).

    The parameters of a block are gathered just before they are needed. With several replicas (hybrid sharding), the
    gradients are summed within each replica, and then among the replicas. The embedding, the last norm and the head
    form one unit, because the embedding and the head may share their table. This unit is gathered until the backward
    pass ends.
    """
    from torch.distributed.fsdp import fully_shard  # imported here because the imports take two seconds
    from torch.distributed.tensor import Shard

    data_mesh = mesh[DATA_DIMS] if layout.replicas > 1 else mesh["fsdp"]
    dims = model.list_shard_dims()
    placements = {parameter: Shard(dims[name].fsdp) for name, parameter in model.named_parameters()}
    for block in model.blocks:
        fully_shard(
            block, mesh=data_mesh, reshard_after_forward=layout.reshard, shard_placement_fn=placements.__getitem__
        )
    fully_shard(model, mesh=data_mesh, shard_placement_fn=placements.__getitem__)


def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Replace all gradients with their means over the replicas, after backward.

    All gradients are sent in one message. Replicas exchange gradients this way unless the parameters are also divided,
    because `fully_shard` then does the same.
    """
    gradients = list_local_gradients(model)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= group.size()
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()


def list_local_gradients(model: nn.Module) -> list[Tensor]:
    """Return this rank's shards of all gradients."""
    gradients = []
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is not None:
            gradients.append(gradient.to_local() if hasattr(gradient, "to_local") else gradient)
    return gradients
