"""Context parallelism: the ranks divide the tokens of each sample, also inside of attention.

The keys and values of all ranks travel around a ring, and each rank attends to those that it holds (ring attention, Liu
et al. 2023, arXiv 2310.01889). All other layers process each token by itself. In the backward pass, the keys and values
travel around the ring again, together with their gradients, to which each rank adds its part.

In causal attention, a token attends only to earlier tokens, so ranks with the first tokens would have less work. The
text is therefore divided into 2 p chunks for p ranks, and rank i holds the chunks i and 2 p - 1 - i (Llama 3, 2024,
arXiv 2407.21783, section 3.3.2). With every block of keys, each rank then computes the same number of scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from common.techniques.parallel_layout.attention_blocks import Attended, Block, attend_block, differentiate_block
from common.techniques.parallel_layout.mesh_ranks import MeshRanks
from common.techniques.parallel_layout.tensor_ranks import TOKEN_DIM, all_gather_tokens

KEYS_VALUES_TAG = 1
GRADIENTS_TAG = 2


def list_positions(tokens: int, index: int, ranks: int) -> Tensor:
    """Return the positions int64 [tokens / ranks] of a rank's tokens in a sample: an early and a late chunk."""
    chunks = torch.arange(tokens).chunk(2 * ranks)
    return torch.cat([chunks[index], chunks[2 * ranks - 1 - index]])


def choose_block(index: int, source: int, tokens: int) -> Block:
    """Return what a rank computes with the keys of the rank `source`. Each rank has `tokens` tokens.

    With its own keys, a rank computes causal attention. With all other keys, it needs no mask. Both chunks of the
    queries lie between the two chunks of a lower rank, and attend to its early chunk. The two chunks of a higher rank
    lie between the chunks of the queries, and only the late chunk of the queries attends to them.
    """
    early_chunk = slice(0, tokens // 2)
    late_chunk = slice(tokens // 2, tokens)
    both_chunks = slice(0, tokens)
    if source == index:
        return Block(queries=both_chunks, keys=both_chunks, is_causal=True)
    if source < index:
        return Block(queries=both_chunks, keys=early_chunk, is_causal=False)
    return Block(queries=late_chunk, keys=both_chunks, is_causal=False)


@dataclass(frozen=True)
class ContextRanks(MeshRanks):
    """The ranks that divide the tokens of the same samples, and the communication among them."""

    def select_tokens(self, x: Tensor) -> Tensor:
        """Return this rank's tokens [N, T / ranks, ...] of all tokens [N, T, ...]."""
        positions = list_positions(x.shape[TOKEN_DIM], self.index, self.size)
        return x[:, positions.to(x.device)]

    def join_tokens(self, x: Tensor) -> Tensor:
        """Return all tokens [N, T, ...] in their order, from each rank's tokens. All ranks must call this method."""
        gathered = all_gather_tokens(x, self.group)
        tokens = gathered.shape[TOKEN_DIM]
        positions = torch.cat([list_positions(tokens, index, self.size) for index in range(self.size)])
        return gathered[:, positions.argsort().to(x.device)]

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return causal attention [N, heads, T, D] of this rank's queries to the keys and values of all ranks.

        `queries` [N, heads, T, D], `keys` and `values` [N, key_value_heads, T, D] are those of this rank's tokens.
        """
        attended: Tensor = RingAttention.apply(queries, keys, values, self)
        return attended

    def list_blocks(self, tokens: int) -> list[Block]:
        """Return the blocks that this rank computes, in the order in which the keys arrive."""
        return [choose_block(self.index, (self.index - step) % self.size, tokens) for step in range(self.size)]

    def start_shift(self, x: Tensor, tag: int) -> Shift:
        """Start to send a tensor to the next rank of the ring, and to receive the tensor of the previous rank."""
        received = torch.empty_like(x)
        sending = dist.isend(x, group=self.group, group_dst=(self.index + 1) % self.size, tag=tag)
        receiving = dist.irecv(received, group=self.group, group_src=(self.index - 1) % self.size, tag=tag)
        assert sending is not None and receiving is not None
        return Shift(x, received, (sending, receiving))


@dataclass(frozen=True)
class Shift:
    """A transfer to the next rank of the ring. It needs both tensors until it is complete."""

    sent: Tensor
    received: Tensor
    transfers: tuple[dist.Work, dist.Work]

    def wait(self) -> Tensor:
        """Wait for both transfers, and return the received tensor."""
        for transfer in self.transfers:
            transfer.wait()
        return self.received


class RingAttention(Function):
    """Causal attention to the keys and values of all ranks. A rank computes with one block while it gets the next."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, ranks: ContextRanks) -> Tensor:
        """Return the outputs [N, heads, T, D] of this rank's queries."""
        keys_values = torch.stack([keys, values])
        own_block, *blocks = ranks.list_blocks(queries.shape[2])
        shift = ranks.start_shift(keys_values, KEYS_VALUES_TAG)
        attended = attend_block(own_block, queries, keys_values)
        for number, block in enumerate(blocks, 1):
            received = shift.wait()
            if number < len(blocks):
                shift = ranks.start_shift(received, KEYS_VALUES_TAG)
            attended.select(block.queries).merge(attend_block(block, queries, received))
        outputs = attended.outputs.to(queries.dtype)
        ctx.save_for_backward(queries, keys_values, outputs, attended.log_sums)
        ctx.ranks = ranks
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients of this rank's queries, keys and values."""
        ranks: ContextRanks = ctx.ranks
        queries, keys_values, outputs, log_sums = ctx.saved_tensors
        attended = Attended(outputs, log_sums)
        query_gradient = torch.zeros_like(queries, dtype=log_sums.dtype)
        # The gradient of the keys and values that this rank has at the moment. It follows them around the ring.
        ring_gradient = torch.zeros_like(keys_values, dtype=log_sums.dtype)
        gradient_shift: Shift | None = None
        for number, block in enumerate(ranks.list_blocks(queries.shape[2]), 1):
            shift = ranks.start_shift(keys_values, KEYS_VALUES_TAG) if number < ranks.size else None
            parts = differentiate_block(block, queries, keys_values, attended, gradients[0])
            query_gradient[:, :, block.queries] += parts[0]
            if gradient_shift is not None:
                ring_gradient = gradient_shift.wait()
            ring_gradient[:, :, :, block.keys] += parts[1]
            gradient_shift = ranks.start_shift(ring_gradient, GRADIENTS_TAG)
            if shift is not None:
                keys_values = shift.wait()
        assert gradient_shift is not None
        key_gradient, value_gradient = gradient_shift.wait().to(queries.dtype)
        return query_gradient.to(queries.dtype), key_gradient, value_gradient, None
