"""Mistakes with the layouts of gpt_parallel: each has its own consequence, compared with the first step of one process.

The layouts divide tensors and batches evenly, so the shard of a rank is a chunk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.models.gpt import Attend, ShardDims, attend_to_past
from common.models.sample_dropout import list_dropout_layers
from common.techniques.parallel_layout.context_ranks import list_positions
from tests.harness.environment.shared_results import create_folder_once
from tests.harness.parity.driver import load_outcomes, train_cases
from tests.harness.parity.gpt_parallel_cases import GPT_PARALLEL, build_gpt
from tests.harness.parity.method import run_reference
from tests.harness.parity.reference import TOLERANCE, list_differences

FEW = "steps=2"
TENSOR = f"tensor=2,{FEW}"
SEQUENCE = f"tensor=2,sequence=true,{FEW}"
CONTEXT = f"context=2,{FEW}"
REPLICAS = f"replicas=2,{FEW}"
CONTEXT_TOKENS = [list_positions(16, index, 2) for index in range(2)]
"""Positions of the tokens of each of two ranks."""
CASES = [
    *(TENSOR, SEQUENCE, CONTEXT, REPLICAS),
    *(f"redraws_shards,{TENSOR}", f"different_masks,{TENSOR}", f"forgets_token_shards,{SEQUENCE}"),
    *(f"restarts_positions,{CONTEXT}", f"averages_outputs,{CONTEXT}"),
    *(f"equal_masks,{REPLICAS}", f"partial_scales,{SEQUENCE}"),
    *(f"unties_head,{TENSOR}", f"counts_table_twice,{TENSOR}", f"averages_per_rank,{REPLICAS}"),
    *(f"local_norm,{TENSOR}", f"counts_copies,{TENSOR}"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, Any]:
    """The training of two ranks, by case."""

    def train(folder: Path) -> None:
        train_cases(GPT_PARALLEL, folder, cache, 2, CASES)

    return load_outcomes(create_folder_once(tmp_path_factory, "layout-mistakes", train), 2)


@pytest.fixture(scope="module")
def single_process(cache: Path) -> dict[str, Any]:
    return run_reference(GPT_PARALLEL, cache, f"replicas=1,{FEW}")


@pytest.fixture(scope="module")
def dims(cache: Path) -> dict[str, ShardDims]:
    """The dimensions in which each parameter is divided, by name."""
    cfg = GPT_PARALLEL.build_config(f"replicas=1,{FEW}", cache, 1)
    model: Any = build_gpt(cfg)
    return dict(model.list_shard_dims())


def list_different(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Return the names of the tensors that differ from the expected ones by more than the tolerance."""
    assert tensors.keys() == expected.keys()
    return [name for name in tensors if (tensors[name] - expected[name]).abs().max() > TOLERANCE]


def compute_first_loss(single_process: dict[str, Any], cache: Path, positions: Tensor, attend: Attend) -> float:
    """Return the loss of the first step of one process with other positions [T] or another attention."""
    cfg = GPT_PARALLEL.build_config(f"replicas=1,{FEW}", cache, 1)
    first_step = single_process["first_step"]
    model: Any = build_gpt(cfg)
    model.load_state_dict(first_step["initial"])
    for block in model.blocks:
        block.attention.divide_tokens(positions, attend)
    for layer in list_dropout_layers([model]):
        layer.set_positions(0, [range(cfg.batch)])
    log_probabilities = model(first_step["inputs"]).log_softmax(-1)
    token_losses = -log_probabilities.gather(-1, first_step["targets"][..., None]).squeeze(-1)
    return token_losses[first_step["is_scored"]].mean().item()


def attend_and_average(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return the mean of the attention to the earlier keys of either rank, if there are keys of both."""
    is_earlier = torch.ones(16, 16, dtype=torch.bool).tril()
    is_on_first_rank = torch.zeros(16, dtype=torch.bool)
    is_on_first_rank[CONTEXT_TOKENS[0]] = True
    is_own = is_on_first_rank[:, None] == is_on_first_rank
    own_keys = is_earlier & is_own
    other_keys = is_earlier & ~is_own
    other_keys = torch.where(other_keys.any(1, keepdim=True), other_keys, own_keys)
    outputs = [F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask) for mask in (own_keys, other_keys)]
    return (outputs[0] + outputs[1]) / 2


def compute_rank_norm(gradients: dict[str, Tensor], dims: dict[str, ShardDims], rank: int) -> float:
    """Return the norm of the gradients that one of two ranks of tensor parallelism holds."""
    square = 0.0
    for name, gradient in gradients.items():
        dim = dims[name].tensor
        local_gradient = gradient if dim is None else gradient.chunk(2, dim)[rank]
        square += local_gradient.square().sum().item()
    return square**0.5


def test_layouts_without_mistakes_equal_one_process(trained: dict[str, Any], single_process: dict[str, Any]) -> None:
    expected = single_process["first_step"]
    masks = {
        TENSOR: [expected["mask"], expected["mask"]],
        SEQUENCE: expected["mask"].chunk(2, dim=1),
        CONTEXT: [expected["mask"][:, held] for held in CONTEXT_TOKENS],
        REPLICAS: expected["mask"].chunk(2, dim=0),
    }
    for case in (TENSOR, SEQUENCE, CONTEXT, REPLICAS):
        assert list_differences(trained[case], single_process) == [], case
        for first_step, mask in zip(trained[case]["first_steps"], masks[case], strict=True):
            assert list_different(first_step["initial"], expected["initial"]) == [], case
            assert list_different(first_step["gradients"], expected["gradients"]) == [], case
            assert torch.equal(first_step["mask"], mask), case


def test_shards_with_initial_values_of_their_own_are_another_model(
    trained: dict[str, Any], single_process: dict[str, Any], dims: dict[str, ShardDims]
) -> None:
    """All divided parameters differ from those of one process, although their standard deviations are the same."""
    first_step, _ = trained[f"redraws_shards,{TENSOR}"]["first_steps"]
    initial = first_step["initial"]
    expected = single_process["first_step"]["initial"]
    divided = [name for name in initial if dims[name].tensor is not None]
    assert list_different(initial, expected) == divided
    for name in divided:
        shards = initial[name].chunk(2, dims[name].tensor)
        expected_shards = expected[name].chunk(2, dims[name].tensor)
        assert not torch.equal(shards[0], shards[1])
        for shard, expected_shard in zip(shards, expected_shards, strict=True):
            assert not torch.isclose(shard, expected_shard, rtol=1e-3, atol=0).any(1).all(), "no row is the same"
            assert shard.std().item() == pytest.approx(expected_shard.std().item(), rel=0.1)
    assert torch.equal(first_step["mask"], single_process["first_step"]["mask"])


def test_different_masks_for_the_same_tokens_make_ranks_differ(
    trained: dict[str, Any], single_process: dict[str, Any]
) -> None:
    """Rank 0 drops the values of one process, and rank 1 drops others of the same tokens."""
    outcome = trained[f"different_masks,{TENSOR}"]
    masks = [first_step["mask"] for first_step in outcome["first_steps"]]
    expected = single_process["first_step"]["mask"]
    assert torch.equal(masks[0], expected)
    assert 0.25 < (masks[1] != expected).double().mean() < 0.4, "2 x 0.2 x 0.8 of independent choices differ"
    assert list_different(outcome["first_steps"][1]["initial"], single_process["first_step"]["initial"]) == []
    assert outcome["differing_ranks"] == [1], "the ranks train the replicated scales of the norms with other gradients"


@pytest.mark.parametrize(
    "case, dim", [(f"forgets_token_shards,{SEQUENCE}", 1), (f"equal_masks,{REPLICAS}", 0)], ids=["tokens", "samples"]
)
def test_equal_masks_for_different_tokens_are_not_those_of_one_process(
    case: str, dim: int, trained: dict[str, Any], single_process: dict[str, Any]
) -> None:
    """The tokens or samples of both ranks lose the values that one process drops in the first half of them."""
    outcome = trained[case]
    first_half, second_half = single_process["first_step"]["mask"].chunk(2, dim)
    assert not torch.equal(first_half, second_half)
    for first_step in outcome["first_steps"]:
        assert torch.equal(first_step["mask"], first_half)
        assert list_different(first_step["initial"], single_process["first_step"]["initial"]) == []
    assert abs(outcome["losses"][0] - single_process["losses"][0]) > TOLERANCE


def test_positions_are_those_in_the_sample_on_every_rank(
    trained: dict[str, Any], single_process: dict[str, Any], cache: Path
) -> None:
    """The loss is that of one process in which the tokens of each rank are numbered from 0."""
    positions = torch.empty(16, dtype=torch.int64)
    for held in CONTEXT_TOKENS:
        positions[held] = torch.arange(len(held))
    expected = compute_first_loss(single_process, cache, positions, attend_to_past)
    assert abs(expected - single_process["losses"][0]) > 100 * TOLERANCE
    outcome = trained[f"restarts_positions,{CONTEXT}"]
    assert outcome["losses"][0] == pytest.approx(expected, abs=TOLERANCE, rel=0)


def test_outputs_of_blocks_are_merged_with_the_sums_of_their_softmax(
    trained: dict[str, Any], single_process: dict[str, Any], cache: Path
) -> None:
    """The loss is that of one process that averages the attention to the keys of both ranks."""
    expected = compute_first_loss(single_process, cache, torch.arange(16), attend_and_average)
    assert abs(expected - single_process["losses"][0]) > 100 * TOLERANCE
    outcome = trained[f"averages_outputs,{CONTEXT}"]
    assert outcome["losses"][0] == pytest.approx(expected, abs=TOLERANCE, rel=0)


def test_scales_of_norms_need_the_gradients_of_all_tokens(
    trained: dict[str, Any], single_process: dict[str, Any], dims: dict[str, ShardDims]
) -> None:
    """Each rank has the part of the gradients of the scales that its tokens contribute."""
    outcome = trained[f"partial_scales,{SEQUENCE}"]
    assert outcome["losses"][0] == pytest.approx(single_process["losses"][0], abs=TOLERANCE, rel=0)
    expected = single_process["first_step"]["gradients"]
    parts = [first_step["gradients"] for first_step in outcome["first_steps"]]
    scales = [name for name in expected if dims[name].tensor is None]
    for part in parts:
        assert list_different(part, expected) == scales
    sums = {name: parts[0][name] + parts[1][name] for name in scales}
    assert list_different(sums, {name: expected[name] for name in scales}) == []
    assert outcome["differing_ranks"] == [1]


def test_a_tied_table_gets_the_gradients_of_both_uses_once(
    trained: dict[str, Any], single_process: dict[str, Any]
) -> None:
    """The rows of tokens that are no inputs have only gradients of the head: none of them, or twice as large ones."""
    table = "embedding.weight"
    expected = single_process["first_step"]["gradients"]
    is_input = torch.zeros(len(expected[table]), dtype=torch.bool)
    is_input[single_process["first_step"]["inputs"].flatten()] = True
    gradients = {}
    for mistake, factor in (("unties_head", 0), ("counts_table_twice", 2)):
        outcome = trained[f"{mistake},{TENSOR}"]
        assert outcome["losses"][0] == pytest.approx(single_process["losses"][0], abs=TOLERANCE, rel=0)
        gradients[mistake] = outcome["first_steps"][0]["gradients"]
        assert list_different(gradients[mistake], expected) == [table], mistake
        unused_rows = gradients[mistake][table][~is_input]
        torch.testing.assert_close(unused_rows, factor * expected[table][~is_input], atol=TOLERANCE, rtol=0)
    mean = (gradients["unties_head"][table] + gradients["counts_table_twice"][table]) / 2
    torch.testing.assert_close(mean, expected[table], atol=TOLERANCE, rtol=0)


def test_a_mean_per_rank_is_not_the_mean_over_the_tokens(
    trained: dict[str, Any], single_process: dict[str, Any]
) -> None:
    """The loss is the mean of the mean losses of both halves of the samples."""
    first_step = single_process["first_step"]
    sums = [losses.sum().item() for losses in first_step["losses"].chunk(2)]
    counts = [is_scored.sum().item() for is_scored in first_step["is_scored"].chunk(2)]
    assert counts[0] != counts[1]
    mean_of_means = (sums[0] / counts[0] + sums[1] / counts[1]) / 2
    assert abs(mean_of_means - sum(sums) / sum(counts)) > 1e-6
    outcome = trained[f"averages_per_rank,{REPLICAS}"]
    assert outcome["losses"][0] == pytest.approx(mean_of_means, abs=TOLERANCE, rel=0)


def test_the_norm_counts_each_shard_and_each_copy_once(
    trained: dict[str, Any], single_process: dict[str, Any], dims: dict[str, ShardDims]
) -> None:
    gradients = single_process["first_step"]["gradients"]
    rank_norms = [compute_rank_norm(gradients, dims, rank) for rank in range(2)]
    norms_of_mistakes = {
        "local_norm": sum(rank_norms) / 2,  # the log contains the mean of both ranks
        "counts_copies": (rank_norms[0] ** 2 + rank_norms[1] ** 2) ** 0.5,
    }
    for mistake, norm in norms_of_mistakes.items():
        outcome = trained[f"{mistake},{TENSOR}"]
        assert abs(norm - single_process["norms"][0]) > 1e-6
        assert outcome["norms"][0] == pytest.approx(norm, abs=TOLERANCE, rel=0), mistake
        assert list_different(outcome["first_steps"][0]["gradients"], gradients) == [], mistake
        assert list_different(outcome["state"], single_process["state"]), "the wrong norm changes the clipped steps"


def test_the_norm_of_sharded_parameters_must_know_of_tensor_shards(
    tmp_path: Path, cache: Path, single_process: dict[str, Any], dims: dict[str, ShardDims]
) -> None:
    case = f"ignores_tensor_shards,tensor=2,fsdp=2,{FEW}"
    outcome = train_cases(GPT_PARALLEL, tmp_path, cache, 4, [case])[case]
    gradients = single_process["first_step"]["gradients"]
    mean_norm = sum(compute_rank_norm(gradients, dims, rank) for rank in range(2)) / 2
    assert outcome["norms"][0] == pytest.approx(mean_norm, abs=TOLERANCE, rel=0)
    assert list_different(outcome["first_steps"][0]["gradients"], gradients) == []
