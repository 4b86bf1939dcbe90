"""Layers of tensor parallelism. Each holds one shard of the parameter of an ordinary layer.

Sources: Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053) and its sequence parallelism (Korthikanti et al. 2022,
arXiv 2205.05198). A parameter is a DTensor, which knows the mesh and the dimension of its shards, so that checkpoints,
norms and reports need no further information. The layers compute with its local shard.

A branch of a block starts at its norm and ends at a row-parallel layer. `TensorRanks` communicates at both ends.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from common.models.gpt import GPT, TiedHead
from common.models.position_dropout import PositionDropout
from common.techniques.parallel_layout.tensor_ranks import TensorRanks, find_local_rows


def get_local_shard(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter. Its gradient becomes the gradient of the shard."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


class ColumnParallelLinear(nn.Module):
    """A linear layer that computes some of the outputs: y_r = x W_r^T, with the rows W_r of the weight matrix."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """Map all inputs [N, T, in] to this rank's outputs [N, T, out / ranks]."""
        return F.linear(x, get_local_shard(self.weight))


class RowParallelLinear(nn.Module):
    """A linear layer that uses some of the inputs: y = sum of x_r W_r^T, with the columns W_r of the weight matrix."""

    def __init__(self, weight: nn.Parameter, ranks: TensorRanks) -> None:
        super().__init__()
        self.weight = weight
        self.ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's inputs [N, T, in / ranks] to the sum of all ranks [N, T, out]."""
        return self.ranks.end_branch(F.linear(x, get_local_shard(self.weight)))


class VocabularyParallelEmbedding(nn.Module):
    """A table of token vectors of which each rank holds the rows of some tokens.

    A rank looks up the tokens in its rows, and uses zeros for all other tokens. The sum over the ranks is complete.
    """

    def __init__(self, weight: nn.Parameter, ranks: TensorRanks, dropout: PositionDropout) -> None:
        super().__init__()
        self.weight = weight
        self.ranks = ranks
        self.dropout = dropout

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [N, T] to vectors [N, T, width], of this rank's tokens in sequence parallelism."""
        table = get_local_shard(self.weight)
        rows, is_local = find_local_rows(tokens, len(table), self.ranks.index)
        vectors = F.embedding(rows, table) * is_local[..., None]
        return self.dropout(self.ranks.end_branch(vectors))


class TiedParallelHead(TiedHead):
    """An output layer that uses this rank's rows of the table of token vectors."""

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens [N, T, width] to the logits of this rank's tokens [N, T, vocabulary / ranks]."""
        return F.linear(x, get_local_shard(self.weight))


class BranchNorm(nn.Module):
    """An RMSNorm at the start of a branch, whose scales every rank holds.

    In sequence parallelism, a rank normalizes only some tokens, so that its gradient of the scales is a part of the sum
    over all tokens.
    """

    def __init__(self, weight: nn.Parameter, epsilon: float, ranks: TensorRanks) -> None:
        super().__init__()
        self.weight = weight
        self.epsilon = epsilon
        self.ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        """Normalize tokens [N, T, width], and return all tokens."""
        weight = get_local_shard(self.weight)
        if self.ranks.is_sequence_parallel:
            weight = self.ranks.copy_to_ranks(weight)
        return self.ranks.start_branch(F.rms_norm(x, weight.shape, weight, self.epsilon))


def divide_model(model: GPT, ranks: TensorRanks) -> None:
    """Replace the layers of a model with layers that hold this rank's shards of the parameters.

    The shards are parts of the initial parameters of the whole model, which must be equal on all ranks. Parameters keep
    their names.
    """
    for name, dims in model.list_shard_dims().items():
        dim = dims.tensor
        layer_name = name.removesuffix(".weight")
        layer = model.get_submodule(layer_name)
        placement: Placement = Replicate() if dim is None else Shard(dim)
        weight = distribute_parameter(layer.weight, ranks, placement)
        model.set_submodule(layer_name, make_parallel_layer(layer, weight, dim, ranks))
    if isinstance(model.head, TiedHead):
        model.set_submodule("head", TiedParallelHead(model.embedding))


def distribute_parameter(parameter: Any, ranks: TensorRanks, placement: Placement) -> nn.Parameter:
    """Return a parameter of which this rank holds a shard or a copy. No data is sent."""
    return nn.Parameter(distribute_tensor(parameter.detach(), ranks.mesh, [placement], src_data_rank=None))


def make_parallel_layer(layer: nn.Module, weight: nn.Parameter, dim: int | None, ranks: TensorRanks) -> nn.Module:
    """Return the parallel layer that replaces a layer.

    `dim` is the dimension in which the weight is divided, or None if every rank holds the weight.
    """
    if isinstance(layer, nn.RMSNorm):
        assert dim is None and layer.eps is not None
        return BranchNorm(weight, layer.eps, ranks)
    if isinstance(layer, nn.Embedding):
        assert dim == 0 and isinstance(layer.dropout, PositionDropout)
        return VocabularyParallelEmbedding(weight, ranks, layer.dropout)
    assert isinstance(layer, nn.Linear)
    return RowParallelLinear(weight, ranks) if dim == 1 else ColumnParallelLinear(weight)
