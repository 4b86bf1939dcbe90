"""Ring attention: its blocks cover each query and key once, give each rank equal work, and equal full attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from common.models.gpt import attend_to_past
from common.system.errors import UserError
from common.techniques.parallel_layout import parallelize
from common.techniques.parallel_layout.attention_blocks import Attended, attend_block, differentiate_block
from common.techniques.parallel_layout.context_ranks import choose_block, list_positions
from configs.layout import Layout

TOKENS = 24
RANKS = (2, 3, 4)


class Heads(NamedTuple):
    """Queries [N, heads, T, D], keys and values [N, key_value_heads, T, D], and the gradient of the outputs."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    gradient: Tensor


def draw_heads(key_value_heads: int, dtype: torch.dtype = torch.float64) -> Heads:
    generator = torch.Generator().manual_seed(0)
    counts = (4, key_value_heads, key_value_heads, 4)
    return Heads(*(torch.randn(2, count, TOKENS, 8, generator=generator).to(dtype) for count in counts))


def list_pairs(index: int, source: int, ranks: int) -> Tensor:
    """Return the pairs of positions [pairs, 2] of a query and a key for which a rank computes a score."""
    block = choose_block(index, source, TOKENS // ranks)
    queries = list_positions(TOKENS, index, ranks)[block.queries]
    keys = list_positions(TOKENS, source, ranks)[block.keys]
    pairs = torch.cartesian_prod(queries, keys).view(len(queries), len(keys), 2)
    if block.is_causal:
        return pairs[torch.ones(len(queries), len(keys), dtype=torch.bool).tril()]
    return pairs.flatten(0, 1)


def attend_in_blocks(heads: Heads, ranks: int) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs of all ranks in the order of the text, and the gradients of queries, keys and values."""
    outputs = torch.empty_like(heads.queries)
    query_gradient = torch.zeros_like(heads.queries)
    key_value_gradients = torch.zeros_like(torch.stack([heads.keys, heads.values]))
    positions = [list_positions(TOKENS, index, ranks) for index in range(ranks)]
    sources = [torch.stack([heads.keys, heads.values])[:, :, :, held] for held in positions]
    for index, held in enumerate(positions):
        queries = heads.queries[:, :, held]
        order = [(index - step) % ranks for step in range(ranks)]
        blocks = [choose_block(index, source, len(held)) for source in order]
        attended = attend_block(blocks[0], queries, sources[index])
        for block, source in zip(blocks[1:], order[1:], strict=True):
            attended.select(block.queries).merge(attend_block(block, queries, sources[source]))
        attended = Attended(attended.outputs.to(outputs.dtype), attended.log_sums)
        outputs[:, :, held] = attended.outputs
        for block, source in zip(blocks, order, strict=True):
            parts = differentiate_block(block, queries, sources[source], attended, heads.gradient[:, :, held])
            query_gradient[:, :, held[block.queries]] += parts[0]
            key_value_gradients[:, :, :, positions[source][block.keys]] += parts[1]
    return outputs, [query_gradient, *key_value_gradients]


@pytest.mark.parametrize("ranks", RANKS)
def test_blocks_contain_each_query_with_each_earlier_key_once(ranks: int) -> None:
    counts = torch.zeros(TOKENS, TOKENS, dtype=torch.int64)
    for index in range(ranks):
        for source in range(ranks):
            pairs = list_pairs(index, source, ranks)
            counts.index_put_((pairs[:, 0], pairs[:, 1]), torch.tensor(1), accumulate=True)
    assert torch.equal(counts, torch.ones_like(counts).tril())


@pytest.mark.parametrize("ranks", RANKS)
def test_an_early_and_a_late_chunk_give_each_rank_the_same_number_of_scores(ranks: int) -> None:
    scores = [[len(list_pairs(index, source, ranks)) for source in range(ranks)] for index in range(ranks)]
    other_blocks = {scores[index][source] for index in range(ranks) for source in range(ranks) if source != index}
    assert other_blocks == {2 * (TOKENS // ranks // 2) ** 2}, "ranks wait for no other rank between two blocks"
    assert [sum(row) for row in scores] == [TOKENS * (TOKENS + 1) // 2 // ranks] * ranks

    # A token at position t attends to t + 1 keys. With consecutive tokens, the last rank computes most scores.
    shards = torch.arange(TOKENS).chunk(ranks)
    consecutive = [int((shard + 1).sum()) for shard in shards]
    size = TOKENS // ranks
    assert consecutive == [size * (size + 1) // 2 + index * size**2 for index in range(ranks)]
    assert consecutive[-1] > 1.4 * sum(consecutive) / ranks
    if ranks == 2:
        assert consecutive == [78, 222], "the numbers on the page"


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("key_value_heads", [4, 2, 1])
def test_blocks_equal_full_attention(ranks: int, key_value_heads: int) -> None:
    heads = draw_heads(key_value_heads)
    inputs = [x.clone().requires_grad_() for x in heads[:3]]
    expected = attend_to_past(*inputs)
    expected_gradients = torch.autograd.grad(expected, inputs, heads.gradient)
    outputs, gradients = attend_in_blocks(heads, ranks)
    torch.testing.assert_close(outputs, expected.detach(), rtol=0, atol=1e-14)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-13)


def test_ring_attention_is_refused_on_gpus() -> None:
    run: Any = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(UserError, match=r"context=2 runs on CPUs only; set launch.device=cpu, or use context=1"):
        parallelize(torch.nn.Identity(), Layout(context=2), run)


def test_blocks_in_bf16_round_little_more_than_full_attention() -> None:
    """The outputs of each block are rounded to bf16, and merged in float32."""
    heads = draw_heads(2, torch.bfloat16)
    exact = attend_to_past(*(x.double() for x in heads[:3]))
    full_error = (attend_to_past(*heads[:3]) - exact).abs().mean()
    error = (attend_in_blocks(heads, 4)[0] - exact).abs().mean()
    assert 0 < error < 1.3 * full_error
