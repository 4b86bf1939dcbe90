"""Communication of tensor and sequence parallelism: pairs of a forward and a backward collective.

Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053) computes a branch of a transformer block on several ranks,
each with a part of the heads or hidden units. Every rank starts with the same tokens, and the outputs of all ranks are
summed. Sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198) also divides the tokens among the ranks outside
of the branches:

    region                   start of a branch                       end of a branch
    tensor parallelism       identity, backward: all-reduce          all-reduce, backward: identity
    sequence parallelism     all-gather, backward: reduce-scatter    reduce-scatter, backward: all-gather

An all-reduce sends as many bytes as a reduce-scatter and an all-gather together, so both columns send the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from common.techniques.parallel_layout.mesh_ranks import MeshRanks

TOKEN_DIM = 1
"""Dimension of the tokens in activations [N, T, width]."""


@dataclass(frozen=True)
class TensorRanks(MeshRanks):
    """The ranks that compute the same samples together, and the communication among them."""

    is_sequence_parallel: bool
    """True if the ranks divide the tokens outside of the branches."""

    def start_branch(self, x: Tensor) -> Tensor:
        """Return all tokens [N, T, width], from this rank's tokens in sequence parallelism."""
        function = GatherTokens if self.is_sequence_parallel else CopyToRanks
        return apply_function(function, x, self.group)

    def end_branch(self, x: Tensor) -> Tensor:
        """Return the sum of the outputs [N, T, width] of all ranks, or this rank's tokens of the sum."""
        function = ScatterTokenSums if self.is_sequence_parallel else SumOverRanks
        return apply_function(function, x, self.group)

    def copy_to_ranks(self, x: Tensor) -> Tensor:
        """Return x, whose gradient becomes the sum of the gradients of all ranks."""
        return apply_function(CopyToRanks, x, self.group)

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of the values of all ranks. The gradient of each value is the gradient of the sum."""
        return apply_function(SumOverRanks, x, self.group)


def apply_function(function: type[Function], x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Apply a function of this module to a tensor."""
    result: Tensor = function.apply(x, group)
    return result


class CopyToRanks(Function):
    """Identity. Backward sums the gradients of all ranks, because every rank has used the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the input."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the sum of the gradients."""
        return all_reduce(gradients[0], ctx.group), None


class SumOverRanks(Function):
    """Sum of the inputs of all ranks. Backward is the identity, because every rank computes the same gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the sum of the inputs."""
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient."""
        return gradients[0], None


class GatherTokens(Function):
    """All-gather of the tokens. Backward sums the gradients of all ranks, and returns those of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the tokens of all ranks."""
        ctx.group = group
        return all_gather_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the summed gradients of this rank's tokens."""
        return reduce_scatter_tokens(gradients[0], ctx.group), None


class ScatterTokenSums(Function):
    """Sum of the inputs of all ranks, of which each rank gets its tokens. Backward gathers the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return this rank's tokens of the sum."""
        ctx.group = group
        return reduce_scatter_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradients of all tokens."""
        return all_gather_tokens(gradients[0], ctx.group), None


def choose_sum_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which the tensors of several ranks are added: float32 for bfloat16, which would round sums."""
    return torch.float32 if x.dtype == torch.bfloat16 else x.dtype


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the tensors of all ranks. The argument does not change."""
    total = x.to(choose_sum_dtype(x), copy=True, memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total.to(x.dtype)


def all_gather_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tokens [N, T, ...] of all ranks, of which each has a shard [N, T / ranks, ...]."""
    ranks = group.size()
    shards = x.new_empty(ranks, *x.shape)
    dist.all_gather_into_tensor(shards.flatten(0, 1), x.contiguous(), group=group)
    return torch.cat(shards.unbind(), dim=TOKEN_DIM)


def reduce_scatter_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shard [N, T / ranks, ...] of the sum of the tensors [N, T, ...] of all ranks."""
    ranks = group.size()
    shards = torch.cat(x.chunk(ranks, dim=TOKEN_DIM)).to(choose_sum_dtype(x))
    total = shards.new_empty(len(shards) // ranks, *shards.shape[1:])
    dist.reduce_scatter_tensor(total, shards, group=group)
    return total.to(x.dtype)


def find_local_rows(tokens: Tensor, rows: int, index: int) -> tuple[Tensor, Tensor]:
    """Return the row of each token in this rank's part of the vocabulary, and whether the token is in this part.

    Each rank holds `rows` consecutive tokens. The row of a token of another rank is 0.
    """
    local_tokens = tokens - index * rows
    is_local = (local_tokens >= 0) & (local_tokens < rows)
    return local_tokens.where(is_local, 0), is_local
