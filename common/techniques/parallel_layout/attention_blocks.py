"""Causal attention computed block by block, each with a part of the queries or keys.

The softmax of a query extends over the keys of all blocks. Each block therefore returns its outputs together with the
logarithm of the sum of the exponentials of its scores, from which the outputs of several blocks are merged (Milakov and
Gimelshein 2018, arXiv 1805.02867). The backward pass of a block needs this logarithm for all blocks together (Dao et
al. 2022, arXiv 2205.14135).

Only this module calls the operator of torch, which is private because `scaled_dot_product_attention` does not return
the logarithms. The operator exists for CPUs only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.models.gpt import repeat_heads

attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Block:
    """Part of an attention: some of the queries and some of the keys, by their indices."""

    queries: slice
    keys: slice
    is_causal: bool
    """True if a query attends only to keys up to its own index; False if it attends to all keys of the block."""


@dataclass(frozen=True)
class Attended:
    """Outputs of an attention, and what is needed to merge them with those of other keys."""

    outputs: Tensor
    """Outputs [N, heads, T, D]."""
    log_sums: Tensor
    """Logarithms of the sums of the exponentials of the scores [N, heads, T], at least in float32."""

    def select(self, queries: slice) -> Attended:
        """Return views of the results of some queries."""
        return Attended(self.outputs[:, :, queries], self.log_sums[:, :, queries])

    def merge(self, other: Attended) -> None:
        """Merge the results of the same queries and of other keys into these results, in place."""
        log_sums = torch.logaddexp(self.log_sums, other.log_sums)
        weights = (self.log_sums - log_sums).exp()
        other_weights = (other.log_sums - log_sums).exp()
        self.outputs.mul_(weights[..., None]).add_(other.outputs * other_weights[..., None])
        self.log_sums.copy_(log_sums)


def attend_block(block: Block, queries: Tensor, keys_values: Tensor) -> Attended:
    """Return the results of a block, in the precision of the logarithms.

    `queries` [N, heads, T, D] are all queries of this rank. `keys_values` [2, N, key_value_heads, T, D] are keys and
    values of one rank.
    """
    keys, values = select_keys(block, keys_values, queries.shape[1])
    outputs, log_sums = attend(queries[:, :, block.queries], keys, values, 0.0, block.is_causal)
    return Attended(outputs.to(log_sums.dtype), log_sums)


def differentiate_block(
    block: Block, queries: Tensor, keys_values: Tensor, attended: Attended, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the parts of the gradients that flow through a block.

    They are the gradient of the block's queries [N, heads, queries, D], and of its keys and values [2, N,
    key_value_heads, keys, D]. `attended` are the results of all blocks, and `gradient` [N, heads, T, D] is the gradient
    of their outputs.
    """
    keys, values = select_keys(block, keys_values, queries.shape[1])
    attended = attended.select(block.queries)
    query_gradient, *key_value_gradients = attend_backward(
        gradient[:, :, block.queries],
        queries[:, :, block.queries],
        keys,
        values,
        attended.outputs,
        attended.log_sums,
        0.0,
        block.is_causal,
    )
    key_value_heads = keys_values.shape[2]
    stacked = torch.stack(key_value_gradients).unflatten(2, (key_value_heads, -1))
    return query_gradient, stacked.sum(3, dtype=attended.log_sums.dtype)


def select_keys(block: Block, keys_values: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return the keys and the values [N, heads, keys, D] of a block, repeated for all queries that use them."""
    keys, values = keys_values[:, :, :, block.keys]
    return repeat_heads(keys, heads), repeat_heads(values, heads)
