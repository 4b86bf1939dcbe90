"""Division of a GPT among ranks, and what a training step needs of it."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.models.gpt import GPT, NOT_SCORED
from common.techniques.parallel_layout import data_ranks
from common.techniques.parallel_layout.tensor_ranks import TensorRanks
from common.techniques.parallel_layout.vocabulary_loss import sum_vocabulary_loss
from common.training.evaluate import score_replicated, score_test_set
from common.training.run import Run
from configs.layout import Layout

MESH_DIMS = ("replicas", "fsdp", "tensor")


def parallelize(model: nn.Module, layout: Layout, run: Run) -> ParallelModel:
    """Divide a model among the ranks of a run, and return what a training step needs.

    The model must have the same parameters on all ranks. Only a GPT can be divided; any other model can have replicas.
    The layers of the model are replaced. Parameters keep their names, and become DTensors if they are divided. Build
    the optimizer afterward. The mesh has the dimensions `replicas`, `fsdp` and `tensor`; ranks that differ only in the
    last one are neighbors.
    """
    if layout.ranks == 1:
        return ParallelModel(model, layout, None)
    sizes = (layout.replicas, layout.fsdp, layout.tensor)
    mesh = init_device_mesh(run.device.type, sizes, mesh_dim_names=MESH_DIMS)
    parallel = ParallelModel(model, layout, mesh)
    if layout.tensor > 1:
        parallel.divide_tensors()
    if layout.fsdp > 1:
        assert isinstance(model, GPT)
        data_ranks.shard_parameters(model, mesh, layout)
    return parallel


class ParallelModel:
    """A model that is divided among ranks.

    `mesh` contains all ranks, or is None for a single rank.
    """

    def __init__(self, model: nn.Module, layout: Layout, mesh: DeviceMesh | None) -> None:
        self.model = model
        self.layout = layout
        self.mesh = mesh
        self.tensor_ranks: TensorRanks | None = None
        """Ranks of tensor parallelism; None if no matrix is divided."""

    def divide_tensors(self) -> None:
        """Divide the matrices among the ranks of the dimension `tensor`."""
        from common.techniques.parallel_layout import tensor_layers  # imports DTensor, which takes a second

        assert self.mesh is not None and isinstance(self.model, GPT)
        self.tensor_ranks = TensorRanks(self.mesh["tensor"], self.layout.sequence)
        tensor_layers.divide_model(self.model, self.tensor_ranks)
        silence_redistribution_warnings()

    @property
    def data_shard(self) -> tuple[int, int]:
        """Index of this rank's shard of a batch, and number of shards. The ranks of `tensor` have the same shard."""
        if self.mesh is None:
            return 0, 1
        replica = self.mesh.get_local_rank("replicas")
        return replica * self.layout.fsdp + self.mesh.get_local_rank("fsdp"), self.layout.data_shards

    def sum_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the cross-entropy over the scored tokens of this rank's samples.

        `logits` [N, T, vocabulary] are the outputs of the model, which tensor parallelism divides by vocabulary.
        `targets` int64 [N, T] are NOT_SCORED for tokens that are not scored. The ranks of `tensor` have equal sums.
        """
        if logits.dtype == torch.bfloat16:
            logits = logits.float()  # in bf16, the sum of a thousand losses would be rounded to an integer
        if self.tensor_ranks is None:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NOT_SCORED, reduction="sum")
        return sum_vocabulary_loss(logits, targets, self.tensor_ranks)

    def average_gradients(self) -> None:
        """Average the gradients over the replicas. With fsdp, backward has averaged them already."""
        if self.mesh is not None and self.layout.replicas > 1 and self.layout.fsdp == 1:
            data_ranks.average_gradients(self.model, self.mesh.get_group("replicas"))

    def score(self, run: Run) -> dict[str, float]:
        """Return the test scores. All ranks must call this method."""
        if self.tensor_ranks is None:
            return score_replicated(self.model, run)
        return score_test_set(self.predict, run, shard=self.data_shard)

    def predict(self, x: Tensor | None, _: int) -> Tensor | None:
        """Return the logits [n, T, vocabulary] on the first rank of each tensor group, and None on the other ranks."""
        logits = self.join_logits(self.model(x))
        return logits if self.tensor_ranks is None or self.tensor_ranks.index == 0 else None

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
