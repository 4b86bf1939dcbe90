"""Mistakes with the layouts of gpt_parallel: each changes the training, compared with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.environment.shared_results import create_folder_once
from tests.harness.parity.driver import load_outcomes, train_cases
from tests.harness.parity.gpt_parallel_cases import GPT_PARALLEL
from tests.harness.parity.method import run_reference
from tests.harness.parity.reference import list_differences

FEW = "steps=6"
TENSOR = f"tensor=2,{FEW}"
SEQUENCE = f"tensor=2,sequence=true,{FEW}"
CONTEXT = f"context=2,{FEW}"
REPLICAS = f"replicas=2,{FEW}"
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


def find_first_loss_gap(outcome: dict[str, Any], single_process: dict[str, Any]) -> float:
    """Return the difference between the losses before the first update."""
    gap: float = abs(outcome["losses"][0] - single_process["losses"][0])
    return gap


def find_largest_loss_gap(outcome: dict[str, Any], single_process: dict[str, Any]) -> float:
    """Return the largest difference between the losses of all steps. The first loss depends little on the masks."""
    return max(abs(a - b) for a, b in zip(outcome["losses"], single_process["losses"], strict=True))


def find_first_norm_ratio(outcome: dict[str, Any], single_process: dict[str, Any]) -> float:
    """Return the gradient norm of the first step relative to the norm of one process."""
    ratio: float = outcome["norms"][0] / single_process["norms"][0]
    return ratio


def test_layouts_without_mistakes_equal_one_process(trained: dict[str, Any], single_process: dict[str, Any]) -> None:
    for case in (TENSOR, SEQUENCE, CONTEXT, REPLICAS):
        assert list_differences(trained[case], single_process) == [], case


def test_shards_with_initial_values_of_their_own_are_another_model(
    trained: dict[str, Any], single_process: dict[str, Any]
) -> None:
    assert find_largest_loss_gap(trained[f"redraws_shards,{TENSOR}"], single_process) > 1e-3


def test_different_masks_for_the_same_tokens_make_ranks_differ(
    trained: dict[str, Any], single_process: dict[str, Any]
) -> None:
    outcome = trained[f"different_masks,{TENSOR}"]
    assert find_largest_loss_gap(outcome, single_process) > 1e-3
    assert outcome["differing_ranks"] == [1], "the ranks train the replicated scales of the norms with other gradients"


@pytest.mark.parametrize("case", [f"forgets_token_shards,{SEQUENCE}", f"equal_masks,{REPLICAS}"])
def test_equal_masks_for_different_tokens_are_not_those_of_one_process(
    case: str, trained: dict[str, Any], single_process: dict[str, Any]
) -> None:
    assert find_largest_loss_gap(trained[case], single_process) > 1e-3


def test_positions_are_those_in_the_sample_on_every_rank(
    trained: dict[str, Any], single_process: dict[str, Any]
) -> None:
    gap = find_largest_loss_gap(trained[f"restarts_positions,{CONTEXT}"], single_process)
    assert gap > 1e-4, "a model that has trained for six steps uses the positions little"


def test_outputs_of_blocks_are_merged_with_the_sums_of_their_softmax(
    trained: dict[str, Any], single_process: dict[str, Any]
) -> None:
    assert find_largest_loss_gap(trained[f"averages_outputs,{CONTEXT}"], single_process) > 1e-3


def test_scales_of_norms_need_the_gradients_of_all_tokens(
    trained: dict[str, Any], single_process: dict[str, Any]
) -> None:
    outcome = trained[f"partial_scales,{SEQUENCE}"]
    assert find_first_loss_gap(outcome, single_process) < 1e-9, "only the gradients are wrong"
    assert outcome["differing_ranks"] == [1]


def test_a_tied_table_gets_the_gradients_of_both_uses_once(
    trained: dict[str, Any], single_process: dict[str, Any]
) -> None:
    for mistake in ("unties_head", "counts_table_twice"):
        outcome = trained[f"{mistake},{TENSOR}"]
        assert find_first_loss_gap(outcome, single_process) < 1e-9, "only the gradients are wrong"
        assert abs(find_first_norm_ratio(outcome, single_process) - 1) > 0.01, mistake


def test_a_mean_per_rank_is_not_the_mean_over_the_tokens(
    trained: dict[str, Any], single_process: dict[str, Any]
) -> None:
    assert find_largest_loss_gap(trained[f"averages_per_rank,{REPLICAS}"], single_process) > 1e-3


def test_the_norm_counts_each_shard_and_each_copy_once(trained: dict[str, Any], single_process: dict[str, Any]) -> None:
    assert find_first_norm_ratio(trained[f"local_norm,{TENSOR}"], single_process) < 0.9
    assert find_first_norm_ratio(trained[f"counts_copies,{TENSOR}"], single_process) > 1 + 1e-6
    distance = max(
        (tensor - single_process["state"][name]).abs().max().item()
        for name, tensor in trained[f"local_norm,{TENSOR}"]["state"].items()
    )
    assert distance > 1e-6, "the wrong norm changes the clipped steps"


def test_the_norm_of_sharded_parameters_must_know_of_tensor_shards(
    tmp_path: Path, cache: Path, single_process: dict[str, Any]
) -> None:
    case = f"ignores_tensor_shards,tensor=2,fsdp=2,{FEW}"
    outcome = train_cases(GPT_PARALLEL, tmp_path, cache, 4, [case])[case]
    assert find_first_norm_ratio(outcome, single_process) < 0.9
