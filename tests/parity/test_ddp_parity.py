"""Data parallelism equals one process, in float64, to 1e-9: losses, parameters, buffers, evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.environment.randomness import draw_cases
from tests.harness.environment.shared_results import create_folder_once
from tests.harness.parity.ddp_cases import DDP
from tests.harness.parity.driver import load_outcomes, train_cases
from tests.harness.parity.method import run_reference
from tests.harness.parity.reference import list_differences, list_loss_differences

DDP_CASES = [
    "strategy=ddp",
    "gradient_as_bucket_view=false,bucket_mb=25",
    "static_graph=true",
    "find_unused_parameters=true",
]
FSDP_CASES = ["strategy=fsdp", "strategy=fsdp,reshard=false"]
HYBRID_CASES = ["strategy=fsdp,fsdp=2", "strategy=fsdp,fsdp=2,reshard=false"]
ZERO1 = "zero1=true"
ZERO1_WITHOUT_CLIPPING = "zero1=true,clip=0,log.gradient_norm=true,steps=10"
MISTAKES = ("sums_losses", "no_communication", "same_share")
SLOW = "slow_rank,steps=25"
GENTLE = "optim.lr=0.05"  # larger steps amplify rounding
HOOKS = [f"communication={name},{GENTLE}" for name in ("fp16", "bf16", "powersgd")]
CONVNET = "model=convnet"
SYNCED = "model=resnet18,sync_batchnorm=true"
NOT_SYNCED = "model=resnet18"
BRIEF = f"{SYNCED},steps=10"


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, Any]:
    """The results of every ConvNet case of two processes, correct ones and mistakes."""
    cases = [*FSDP_CASES, *DDP_CASES, ZERO1, ZERO1_WITHOUT_CLIPPING]
    cases += [*(f"{mistake},clip=0" for mistake in MISTAKES), SLOW, *HOOKS]
    folder = create_folder_once(tmp_path_factory, "ddp-of-two", lambda path: train_cases(DDP, path, cache, 2, cases))
    return load_outcomes(folder, 2)


@pytest.mark.parametrize("processes", [1, *draw_cases("convnet-ranks", [2, 4], 1)])
def test_ddp_and_fsdp_of_the_convnet_equal_one_process(
    processes: int, tmp_path: Path, cache: Path, request: pytest.FixtureRequest
) -> None:
    if processes == 2:
        cases = [*FSDP_CASES, *DDP_CASES, ZERO1]
        outcomes = request.getfixturevalue("of_two")
    else:
        cases = [FSDP_CASES[0], DDP_CASES[0]]
        if processes == 4:
            cases += [*HYBRID_CASES, ZERO1]
        outcomes = train_cases(DDP, tmp_path, cache, processes, cases)
    reference_run = run_reference(DDP, cache, CONVNET)
    for case in cases:
        assert list_differences(outcomes[case], reference_run) == [], case
    losses = reference_run["losses"]
    assert len(losses) == 30
    assert len(outcomes[cases[0]]["norms"]) == 30, "clipping computes the norms"
    assert losses[-1] < 0.9 * losses[0], "the comparison requires a model that learns"
    if ZERO1 in cases:
        assert outcomes[ZERO1]["losses"] == outcomes[DDP_CASES[0]]["losses"], "dividing the state changes no bit"
        assert outcomes[ZERO1]["differing_ranks"] == []


def test_the_norm_contains_the_gradients_of_all_ranks_if_they_divide_the_optimizer(
    cache: Path, of_two: dict[str, Any]
) -> None:
    reference_run = run_reference(DDP, cache, "clip=0,steps=10")
    assert list_differences(of_two[ZERO1_WITHOUT_CLIPPING], reference_run) == []
    assert len(of_two[ZERO1_WITHOUT_CLIPPING]["norms"]) == 10


@pytest.mark.drawn
def test_resnet_equals_one_process_with_and_without_synchronised_norms(tmp_path: Path, cache: Path) -> None:
    brief_fsdp = f"{BRIEF},strategy=fsdp"
    recomputed = f"{BRIEF},recompute=blocks"
    recomputed_fsdp = f"{brief_fsdp},recompute=selective"
    cases = [SYNCED, NOT_SYNCED, brief_fsdp, recomputed, recomputed_fsdp]
    outcomes = train_cases(DDP, tmp_path, cache, 2, cases)
    synced_run = run_reference(DDP, cache, SYNCED)
    assert list_differences(outcomes[SYNCED], synced_run) == []
    brief_run = run_reference(DDP, cache, BRIEF)
    for case in (brief_fsdp, recomputed):
        assert list_differences(outcomes[case], brief_run) == [], case
    assert outcomes[recomputed_fsdp]["losses"] == outcomes[brief_fsdp]["losses"]
    for name, tensor in outcomes[brief_fsdp]["state"].items():
        assert torch.equal(outcomes[recomputed_fsdp]["state"][name], tensor), name
    not_synced = outcomes[NOT_SYNCED]
    two_shards = run_reference(DDP, cache, NOT_SYNCED, (2, 2))
    assert list_differences(not_synced, two_shards) == []

    # the check sees norms that are not synchronised, and buffers before they are averaged
    assert list_loss_differences(not_synced, synced_run)
    not_averaged = not_synced | {"state": not_synced["state_before_evaluation"]}
    differences = list_differences(not_averaged, two_shards)
    assert differences
    assert all("running_" in difference for difference in differences)


def test_the_check_sees_ranks_with_different_models(of_two: dict[str, Any]) -> None:
    assert of_two["strategy=ddp"]["differing_ranks"] == []
    assert of_two["no_communication,clip=0"]["differing_ranks"] == [1]


def test_a_failed_case_is_named(tmp_path: Path, cache: Path) -> None:
    failing_case = "fails_on_rank_1,steps=5"
    with pytest.raises(AssertionError, match="ArithmeticError: planted failure") as caught:
        train_cases(DDP, tmp_path, cache, 2, ["steps=5", failing_case, "steps=6"])
    assert f"The case is {failing_case}." in str(caught.value)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_check_sees_mistakes_of_data_parallelism(mistake: str, cache: Path, of_two: dict[str, Any]) -> None:
    reference_run = run_reference(DDP, cache, "clip=0")
    assert list_loss_differences(of_two[f"{mistake},clip=0"], reference_run)


def test_a_slow_process_is_named_as_the_straggler(of_two: dict[str, Any]) -> None:
    assert of_two[SLOW]["straggler"] == 1
    # Rank 1 sleeps for 0.1 s in each forward pass, so rank 0 waits after its last gradient until backward can end.
    assert of_two[SLOW]["exposed"] > 0.05


def test_communication_hooks_lose_only_digits(cache: Path, of_two: dict[str, Any]) -> None:
    reference_run = run_reference(DDP, cache, GENTLE)
    exact = torch.tensor(reference_run["losses"], dtype=torch.float64)
    gaps = []
    for hook in HOOKS:
        assert of_two[hook]["differing_ranks"] == [], "processes hold different models"
        losses = torch.tensor(of_two[hook]["losses"], dtype=torch.float64)
        gaps.append((losses - exact).abs())
    fp16, bf16, powersgd = gaps
    for gap in (fp16, bf16):  # rounding, which training amplifies
        assert 1e-9 < gap[:8].max() < 1e-4
        assert gap.max() < 0.1
    assert powersgd[:10].max() < 1e-9, "the gradients of the first nine steps are not compressed"
    assert powersgd[10] > 1e-9, "the gradients of step 10 are compressed"
    assert powersgd.max() < 0.5
