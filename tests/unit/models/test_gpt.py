"""The GPT: sizes, initial values, positions, causality, and the model that its recipe builds."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from common.models import networks
from common.models.gpt import GPT, NORM_EPSILON, Attention, ShardDims, rotate_positions
from common.models.weights import load_weights
from common.system.errors import UserError

TOKENS = torch.arange(24).view(2, 12) * 7 % 32


def build_gpt(**options: object) -> GPT:
    torch.manual_seed(0)
    settings: dict[str, object] = {"width": 32, "layers": 2, "heads": 4}
    return GPT(12, 32, **(settings | options)).double()  # type: ignore[arg-type]


@pytest.mark.parametrize("activation, hidden", [("swiglu", 96), ("gelu", 128)])
@pytest.mark.parametrize("tied", [True, False])
def test_layers_have_the_documented_names_and_sizes(activation: str, hidden: int, tied: bool) -> None:
    model = build_gpt(activation=activation, tied=tied, key_value_heads=2)
    assert [name for name, _ in model.named_children()] == ["embedding", "block0", "block1", "norm", "head"]
    assert model(TOKENS).shape == (2, 12, 32)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes["block1.attention.query.weight"] == (32, 32)
    assert shapes["block1.attention.key.weight"] == (16, 32)
    assert shapes["block1.feed_forward.up.weight"] == (hidden, 32)
    assert ("head.weight" in shapes) is not tied
    assert not [name for name in shapes if name.endswith("bias")]


def test_every_parameter_states_how_it_is_divided() -> None:
    model = build_gpt(tied=False)
    dims = model.list_shard_dims()
    assert dims.keys() == dict(model.named_parameters()).keys()
    by_outputs = ShardDims(tensor=0, fsdp=0)
    assert dims["embedding.weight"] == dims["head.weight"] == by_outputs
    assert dims["block0.attention.key.weight"] == dims["block0.feed_forward.gate.weight"] == by_outputs
    by_inputs = ShardDims(tensor=1, fsdp=0)
    assert dims["block0.attention.output.weight"] == dims["block1.feed_forward.down.weight"] == by_inputs
    assert dims["norm.weight"] == dims["block0.attention_norm.weight"] == ShardDims(tensor=None, fsdp=0)


def test_weights_that_end_a_branch_start_smaller() -> None:
    torch.manual_seed(0)
    model = GPT(8, 64, width=256, layers=8, heads=4)
    block = model.blocks[3]
    assert block.attention.query.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.02)
    for matrix in (block.attention.output.weight, block.feed_forward.down.weight):
        assert matrix.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert torch.equal(block.attention_norm.weight, torch.ones(256))


def test_a_token_does_not_see_later_tokens() -> None:
    model = build_gpt()
    changed = TOKENS.clone()
    changed[:, 7:] += 1
    logits = model(TOKENS)
    changed_logits = model(changed % 32)
    assert torch.equal(changed_logits[:, :7], logits[:, :7])
    assert not torch.allclose(changed_logits[:, 7:], logits[:, 7:])


def test_products_of_rotated_vectors_depend_on_distances_only() -> None:
    queries, keys = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def multiply(query_position: int, key_position: int) -> float:
        rotated_query = rotate_positions(queries, torch.tensor([query_position]))
        rotated_key = rotate_positions(keys, torch.tensor([key_position]))
        return (rotated_query * rotated_key).sum().item()

    assert multiply(9, 5) == pytest.approx(multiply(104, 100), abs=1e-12)
    assert multiply(9, 5) != pytest.approx(multiply(9, 6), abs=1e-3)
    assert torch.equal(rotate_positions(queries, torch.tensor([0])), queries), "position 0 is not rotated"


def test_grouped_attention_equals_attention_with_repeated_keys_and_values() -> None:
    torch.manual_seed(0)
    grouped = Attention(32, 4, 2).double()
    full = Attention(32, 4, 4).double()
    for name in ("query", "output"):
        full.get_submodule(name).load_state_dict(grouped.get_submodule(name).state_dict())
    with torch.no_grad():
        for layer, source in ((full.key, grouped.key), (full.value, grouped.value)):
            heads = source.weight.view(2, 8, 32)
            layer.weight.copy_(heads.repeat_interleave(2, dim=0).flatten(0, 1))
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    assert torch.allclose(grouped(x), full(x), rtol=0, atol=1e-14)


def reference_norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + NORM_EPSILON).sqrt()


def test_a_block_adds_both_branches() -> None:
    model = build_gpt()
    block = model.blocks[0]
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    middle = x + block.attention(reference_norm(x))
    expected = middle + block.feed_forward(reference_norm(middle))
    assert torch.allclose(block(x), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("tied", [True, False])
def test_the_recipe_and_a_copy_compute_the_same(tied: bool) -> None:
    model = build_gpt(tied=tied, dropout=0.5)
    kind = networks.find_kind("GPT")
    assert kind is not None
    rebuilt = kind(**model.recipe["arguments"]).double()
    rebuilt.load_state_dict(model.state_dict())
    copied = copy.deepcopy(model)
    expected = model.eval()(TOKENS)
    assert torch.equal(rebuilt.eval()(TOKENS), expected)
    assert torch.equal(copied.eval()(TOKENS), expected)
    with torch.no_grad():
        copied.embedding.weight.zero_()
    assert torch.equal(model(TOKENS), expected), "a copy has a table of its own"


def test_unsuitable_sizes_are_refused() -> None:
    with pytest.raises(UserError, match=r"width must be a multiple of 2 x heads = 8 \(got 30\); use width=24"):
        build_gpt(width=30)
    with pytest.raises(UserError, match=r"heads=4 is not a multiple of key_value_heads=3"):
        build_gpt(key_value_heads=3)
    with pytest.raises(ValueError, match=r"the text has 13 tokens, but the context of the model is 12"):
        build_gpt()(torch.zeros(1, 13, dtype=torch.int64))


def test_weights_of_another_size_are_refused() -> None:
    state = build_gpt(width=64).state_dict()
    with pytest.raises(UserError, match=r"\(32, 64\), expected \(32, 32\); use the sizes of the model in the file"):
        load_weights(build_gpt(), state, "weights.pt")
