"""Division of a GPT among ranks, and what a training step needs of it."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.models.gpt import GPT, NOT_SCORED
from common.techniques.parallel_layout import data_ranks
from common.training.run import Run
from configs.layout import Layout

MESH_DIMS = ("replicas", "fsdp", "tensor")


def parallelize(model: GPT, layout: Layout, run: Run) -> ParallelModel:
    """Divide a model among the ranks of a run, and return what a training step needs.

    The model must have the same parameters on all ranks. Its layers are replaced, and its parameters become DTensors
    with the same names if they are divided. Build the optimizer afterward. The mesh has the dimensions `replicas`,
    `fsdp` and `tensor`; ranks that differ only in the last one are neighbors.
    """
    if layout.ranks == 1:
        return ParallelModel(model, layout, None)
    mesh = init_device_mesh(run.device.type, (layout.replicas, layout.fsdp, layout.tensor), mesh_dim_names=MESH_DIMS)
    parallel = ParallelModel(model, layout, mesh)
    if layout.fsdp > 1:
        data_ranks.shard_parameters(model, mesh, layout)
    return parallel


class ParallelModel:
    """A model that is divided among ranks.

    The mean over all ranks of the losses sum_loss(...) / count_tokens(...) is the mean loss over all scored tokens of
    the batch. Likewise, the gradients after `average_gradients` are those of this loss.
    """

    def __init__(self, model: GPT, layout: Layout, mesh: DeviceMesh | None) -> None:
        self.model = model
        self.layout = layout
        self.mesh = mesh
        """Mesh of all ranks; None for a single rank."""
        self.tensor_ranks = None
        """Ranks of tensor parallelism; None if matrices are not divided."""
        if mesh is not None and layout.tensor > 1:
            from common.techniques.parallel_layout import tensor_layers, tensor_ranks  # imports DTensor

            silence_redistribution_warnings()
            self.tensor_ranks = tensor_ranks.TensorRanks(mesh["tensor"], layout.sequence)
            tensor_layers.divide_model(model, self.tensor_ranks)

    @property
    def data_shard(self) -> tuple[int, int]:
        """Index of this rank's shard of a batch, and number of shards. The ranks of `tensor` have the same shard."""
        if self.mesh is None:
            return 0, 1
        replica = self.mesh.get_local_rank("replicas")
        return replica * self.layout.fsdp + self.mesh.get_local_rank("fsdp"), self.layout.data_shards

    def count_tokens(self, targets: Tensor) -> Tensor:
        """Return the number of scored tokens in the batch divided by the number of its shards, at least 1 / shards.

        `targets` are all targets of this rank in the step, of any shape, also of several microbatches. All ranks must
        call this method.
        """
        count = (targets != NOT_SCORED).sum()
        if self.mesh is not None:
            data_ranks.sum_over_data_ranks(count, self.mesh)
        return count.clamp(min=1) / self.layout.data_shards

    def sum_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the cross-entropy over this rank's scored tokens.

        `logits` [N, T, vocabulary] are the outputs of the model, which are divided by vocabulary in tensor
        parallelism. `targets` int64 [N, T] are -100 for tokens that are not scored.
        """
        if self.tensor_ranks is None:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        from common.techniques.parallel_layout.vocabulary_loss import sum_vocabulary_loss

        return sum_vocabulary_loss(logits, targets, self.tensor_ranks)

    def average_gradients(self) -> None:
        """Average the gradients over the replicas. With fsdp, backward has averaged them already."""
        if self.mesh is not None and self.layout.replicas > 1 and self.layout.fsdp == 1:
            data_ranks.average_gradients(self.model, self.mesh.get_group("replicas"))

    def join_logits(self, logits: Tensor) -> Tensor:
        """Return the logits [N, T, vocabulary] of the whole vocabulary, without a gradient."""
        if self.tensor_ranks is None:
            return logits
        local_logits = logits.detach().contiguous()
        parts = [torch.empty_like(local_logits) for _ in range(self.tensor_ranks.size)]
        dist.all_gather(parts, local_logits, group=self.tensor_ranks.group)
        return torch.cat(parts, dim=-1)


def silence_redistribution_warnings() -> None:
    """Silence torch's warning that the full tensor of a parameter takes several messages, as it does on any mesh."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
