"""The dimensions of a mesh whose ranks process different tokens: replicas, sharded parameters (fsdp), and context.

Ranks that divide the tokens of a sample (context) have the same parameters, like ranks with different samples. Their
gradients are added in the same messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from common.models.gpt import GPT, Block
from configs.layout import Layout


def shard_parameters(model: GPT, mesh: DeviceMesh, layout: Layout, roots: Sequence[nn.Module]) -> None:
    """Divide parameters among the ranks of the dimension `fsdp` (FSDP2; Zhao et al. 2023, arXiv 2304.11277).

    Ranks of `context` would hold the same shards. The parameters are divided among them too, which needs no further
    message: the gradients must be summed over these ranks anyway. With several replicas (hybrid sharding), the
    gradients are averaged within each replica, and then among the replicas.

    The parameters of a block are gathered just before they are needed. The embedding, the last norm and the head form
    one unit, because the embedding and the head may share their table. This unit is gathered until the backward pass
    ends. `roots` contains the model or, on a rank of a pipeline, its stages: the modules whose forward is called.
    """
    from torch.distributed.fsdp import fully_shard  # imported here because the imports take two seconds
    from torch.distributed.tensor import Shard

    dim = "fsdp"
    if layout.context > 1:
        dim = "fsdp_context"
        mesh["fsdp", "context"]._flatten(dim)
    data_mesh = mesh["replicas", dim] if layout.replicas > 1 else mesh[dim]
    dims = model.list_shard_dims()
    placements = {parameter: Shard(dims[name].fsdp) for name, parameter in model.named_parameters()}
    for root in roots:
        for layer in root.children():
            if isinstance(layer, Block):
                fully_shard(
                    layer,
                    mesh=data_mesh,
                    reshard_after_forward=layout.reshard,
                    shard_placement_fn=placements.__getitem__,
                )
        fully_shard(root, mesh=data_mesh, shard_placement_fn=placements.__getitem__)


def find_copies(mesh: DeviceMesh, layout: Layout) -> dist.ProcessGroup | None:
    """Return the ranks that hold the same parameters as this rank, or None if no other rank does.

    With fsdp, the ranks of `context` hold different shards.
    """
    if layout.copies == 1:
        return None
    if layout.context == 1 or layout.fsdp > 1:
        return mesh.get_group("replicas")
    if layout.replicas == 1:
        return mesh.get_group("context")
    return mesh["replicas", "fsdp", "context"]._flatten("replicas_context").get_group()


def average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Replace all gradients with their means over a group of ranks, after backward, in one message.

    Which parameters a custom network uses may depend on the samples. A parameter that this rank has not used counts as
    a gradient of zeros. A parameter that no rank has used keeps no gradient, as in a single process. For this purpose,
    the message ends with a flag for each parameter.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    is_used = [parameter.grad is not None for parameter in parameters]
    parts: list[Tensor] = []
    for parameter in parameters:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parts.append(get_local_tensor(gradient))
    flags = torch.tensor(is_used, dtype=parts[0].dtype, device=parts[0].device)
    flat = torch.cat([*(part.flatten() for part in parts), flags])
    dist.all_reduce(flat, group=group)

    sizes = [part.numel() for part in parts]
    *sums, users = flat.split([*sizes, len(parameters)])
    for number, parameter in enumerate(parameters):
        if parameter.grad is None:
            if users[number] == 0:
                continue
            parameter.grad = torch.zeros_like(parameter)
        part = get_local_tensor(parameter.grad)
        part.copy_(sums[number].view_as(part)).div_(group.size())


def get_local_tensor(tensor: Any) -> Tensor:
    """Return this rank's shard of a tensor, without a gradient."""
    local: Any = tensor.detach()
    return local.to_local() if hasattr(local, "to_local") else local
