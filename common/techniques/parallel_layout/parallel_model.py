"""A GPT that is divided among ranks, and what a training step needs of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from common.models.gpt import GPT, NOT_SCORED
from common.models.position_dropout import PositionDropout
from common.models.sample_dropout import list_dropout_layers
from common.ranks.rendezvous import World
from common.runs.result import Report
from common.techniques.parallel_layout import data_ranks, layout_formulas
from common.techniques.parallel_layout.model_shape import ParameterSize, Shape
from common.techniques.parallel_layout.tensor_ranks import TensorRanks
from common.techniques.parallel_layout.vocabulary_loss import sum_vocabulary_loss
from common.training.evaluate import score_replicated, score_test_set
from common.training.run import Run
from configs.layout import Layout

if TYPE_CHECKING:
    from common.techniques.parallel_layout.context_ranks import ContextRanks

MESH_DIMS = ("replicas", "stages", "fsdp", "context", "tensor")
Microbatch = tuple[Tensor, Tensor]
"""Inputs and targets [n, T] of a microbatch."""
ComputeLoss = Callable[[Tensor, Tensor], Tensor]
"""Maps the logits and targets of a microbatch to a loss."""


class ParallelModel:
    """A model that is divided among ranks.

    `mesh` contains all ranks, or is None for a single rank.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, mesh: DeviceMesh | None, autocast: AbstractContextManager[Any]
    ) -> None:
        self.model = model
        self.layout = layout
        self.mesh = mesh
        self.autocast = autocast
        self.tensor_ranks: TensorRanks | None = None
        """Ranks of tensor parallelism; None if no matrix is divided."""
        self.context_ranks: ContextRanks | None = None
        """Ranks of context parallelism; None if each rank has all tokens of its samples."""
        self.copies = data_ranks.find_copies(mesh, layout) if mesh is not None else None
        """Ranks that hold the same parameters as this rank; None if there are none."""

    @property
    def layers(self) -> nn.Module:
        """All layers that this rank computes."""
        return self.model

    @property
    def peers(self) -> World | None:
        """Ranks that hold the same stages as this rank, or None if every rank holds the whole model."""
        return None

    def divide(self, run: Run) -> None:
        """Divide the model among the ranks of the mesh."""
        self.divide_layers_and_tokens()
        if self.layout.fsdp > 1:
            self.shard_parameters([self.model])

    def divide_layers_and_tokens(self) -> None:
        """Divide the matrices of each layer, and the tokens of each sample."""
        if self.layout.tensor > 1:
            self.divide_tensors()
        if self.layout.context > 1 or self.layout.sequence:
            self.divide_tokens()

    def shard_parameters(self, roots: Sequence[nn.Module]) -> None:
        """Divide the parameters of some modules, whose forward is called, among the ranks of the dimension `fsdp`."""
        assert self.mesh is not None and isinstance(self.model, GPT)
        data_ranks.shard_parameters(self.model, self.mesh, self.layout, roots)

    def divide_tensors(self) -> None:
        """Divide the matrices among the ranks of the dimension `tensor`."""
        from common.techniques.parallel_layout import tensor_layers  # imports DTensor, which takes a second

        assert self.mesh is not None and isinstance(self.model, GPT)
        self.tensor_ranks = TensorRanks(self.mesh["tensor"], self.layout.sequence)
        tensor_layers.divide_model(self.model, self.tensor_ranks)
        silence_redistribution_warnings()

    def divide_tokens(self) -> None:
        """Let each rank process its own tokens of each sample, at their positions in the sample.

        `context` divides the tokens everywhere. `sequence` divides those of a rank further, except in the branches.
        """
        assert self.mesh is not None and isinstance(self.model, GPT)
        positions = torch.arange(self.model.context)
        shards = self.layout.context
        if self.layout.context > 1:
            from common.techniques.parallel_layout.context_ranks import ContextRanks  # a technique that few runs use

            self.context_ranks = ContextRanks(self.mesh["context"])
            positions = self.context_ranks.select_tokens(positions[None])[0]
            for block in self.model.blocks:
                block.attention.divide_tokens(positions, self.context_ranks.attend)
        if self.layout.sequence:
            assert self.tensor_ranks is not None
            positions = positions.chunk(self.tensor_ranks.size)[self.tensor_ranks.index]
            shards *= self.tensor_ranks.size
        for layer in list_dropout_layers([self.model]):
            assert isinstance(layer, PositionDropout)
            layer.set_token_positions(positions, shards)

    @property
    def data_shard(self) -> tuple[int, int]:
        """Index of this rank's shard of a batch, and number of shards.

        The ranks of `stages`, `context` and `tensor` have the same shard.
        """
        if self.mesh is None:
            return 0, 1
        replica = self.mesh.get_local_rank("replicas")
        return replica * self.layout.fsdp + self.mesh.get_local_rank("fsdp"), self.layout.data_shards

    def select_tokens(self, microbatches: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's tokens [n, T / context] of the inputs and targets [n, T] of each microbatch."""
        if self.context_ranks is None:
            return list(microbatches)
        select = self.context_ranks.select_tokens
        return [(select(inputs), select(targets)) for inputs, targets in microbatches]

    def forward_backward(self, microbatches: Sequence[Microbatch], compute_loss: ComputeLoss) -> Tensor:
        """Compute the forward and the backward passes of all microbatches, and add the gradients.

        Returns the sum of the losses of this rank, a 0-d tensor. With fsdp, backward also averages the gradients over
        the ranks of `fsdp`.
        """
        total = torch.zeros((), dtype=next(self.model.parameters()).dtype, device=microbatches[0][0].device)
        for inputs, targets in microbatches:
            with self.autocast:
                logits = self.model(inputs)
            loss = compute_loss(logits, targets)
            total += loss.detach()
            loss.backward()
        return total

    def sum_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the cross-entropy over the scored tokens of this rank.

        `logits` [N, T, vocabulary] are the outputs of the model, which tensor parallelism divides by vocabulary.
        `targets` int64 [N, T] are NOT_SCORED for tokens that are not scored. The ranks of `tensor` have equal sums.
        """
        if logits.dtype == torch.bfloat16:
            logits = logits.float()  # in bf16, the sum of a thousand losses would be rounded to an integer
        if self.tensor_ranks is None:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NOT_SCORED, reduction="sum")
        return sum_vocabulary_loss(logits, targets, self.tensor_ranks)

    def average_gradients(self) -> None:
        """Average the gradients over replicas and context. With fsdp, backward has averaged them already."""
        if self.copies is not None and self.layout.fsdp == 1:
            data_ranks.average_gradients(self.model, self.copies)

    def score(self, run: Run) -> dict[str, float]:
        """Return the test scores. All ranks must call this method."""
        with self.autocast:
            if self.tensor_ranks is None and self.context_ranks is None:
                return score_replicated(self.model, run)
            return score_test_set(self.predict, run, shard=self.data_shard)

    def predict_bytes(self, sizes: Mapping[str, ParameterSize], shape: Shape) -> dict[str, int]:
        """Return the bytes of this rank by category, and the bytes that it sends in a step, from formulas.

        `sizes` are those of this rank's parameters, by name.
        """
        return layout_formulas.predict_bytes(sizes, shape, self.layout)

    def gather_reports(self, run: Run) -> list[Report]:
        """Return further reports for the final table. All ranks must call this method."""
        return []

    def predict(self, x: Tensor | None, _: int) -> Tensor | None:
        """Return the logits [n, T, vocabulary] on the first of the ranks with the same samples, otherwise None."""
        if self.context_ranks is not None:
            x = self.context_ranks.select_tokens(cast(Tensor, x))
        return self.join_logits(self.model(x))

    def join_logits(self, logits: Tensor) -> Tensor | None:
        """Return the logits [N, T, vocabulary] of all tokens and of the whole vocabulary, without a gradient.

        They are returned on the first of the ranks with the same samples, all of which must call this method.
        """
        logits = logits.detach()
        if self.tensor_ranks is not None:
            local_logits = logits.contiguous()
            parts = [torch.empty_like(local_logits) for _ in range(self.tensor_ranks.size)]
            dist.all_gather(parts, local_logits, group=self.tensor_ranks.group)
            logits = torch.cat(parts, dim=-1)
        if self.context_ranks is not None:
            logits = self.context_ranks.join_tokens(logits)
        indices = [ranks.index for ranks in (self.tensor_ranks, self.context_ranks) if ranks is not None]
        return None if any(indices) else logits


def silence_redistribution_warnings() -> None:
    """Silence torch's warning that gathering a parameter over several mesh dimensions needs several messages."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
