"""Data parallelism equals one process, in float64, to 1e-9: losses, parameters, buffers, evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.environment.shared_results import create_folder_once
from tests.harness.parity.cases import train_cases
from tests.harness.parity.ddp_cases import expected, wrong

DDP = ["strategy=ddp", "gradient_as_bucket_view=false,bucket_mb=25", "static_graph=true", "find_unused_parameters=true"]
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
    cases = ["strategy=fsdp", *DDP, *(f"{mistake},clip=0" for mistake in MISTAKES), SLOW, *HOOKS]
    folder = create_folder_once(
        tmp_path_factory, "ddp-of-two", lambda path: train_cases("ddp_cases", path, cache, 2, cases)
    )
    return dict(torch.load(folder / "results-2.pt", weights_only=True))


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_ddp_and_fsdp_of_the_convnet_equal_one_process(
    processes: int, tmp_path: Path, cache: Path, request: pytest.FixtureRequest
) -> None:
    if processes == 2:
        cases = ["strategy=fsdp", *DDP]
        trained = request.getfixturevalue("of_two")
    else:
        cases = ["strategy=fsdp", DDP[0]]
        trained = train_cases("ddp_cases", tmp_path, cache, processes, cases)
    single_process = expected(cache, CONVNET)
    for case in cases:
        assert wrong(trained[case], single_process) == [], case
    losses = single_process["losses"]
    assert len(losses) == 30
    assert losses[-1] < 0.9 * losses[0], "the comparison requires a model that learns"


def test_resnet_equals_one_process_with_and_without_synchronised_norms(tmp_path: Path, cache: Path) -> None:
    brief_fsdp = f"{BRIEF},strategy=fsdp"
    trained = train_cases("ddp_cases", tmp_path, cache, 2, [SYNCED, NOT_SYNCED, brief_fsdp])
    assert wrong(trained[SYNCED], expected(cache, SYNCED)) == []
    assert wrong(trained[brief_fsdp], expected(cache, BRIEF)) == []
    not_synced = trained[NOT_SYNCED]
    two_shares = expected(cache, NOT_SYNCED, shares=2)
    assert wrong(not_synced, two_shares) == []

    # the check sees norms that are not synchronised, and buffers before they are averaged
    assert any("losses" in difference for difference in wrong(not_synced, expected(cache, SYNCED)))
    differing = wrong(not_synced | {"state": not_synced["before"]}, two_shares)
    assert differing
    assert all("running_" in difference for difference in differing)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_check_sees_mistakes_of_data_parallelism(mistake: str, cache: Path, of_two: dict[str, Any]) -> None:
    differing = wrong(of_two[f"{mistake},clip=0"], expected(cache, "clip=0"))
    assert any("losses" in difference for difference in differing)


def test_a_slow_process_is_named_as_the_straggler(of_two: dict[str, Any]) -> None:
    assert of_two[SLOW]["straggler"] == 1
    # Rank 1 sleeps for 0.1 s in each forward pass, so rank 0 waits after its last gradient until backward can end.
    assert of_two[SLOW]["exposed"] > 0.05


def test_communication_hooks_lose_only_digits(cache: Path, of_two: dict[str, Any]) -> None:
    exact = torch.tensor(expected(cache, GENTLE)["losses"], dtype=torch.float64)
    gaps = []
    for hook in HOOKS:
        assert len(set(of_two[hook]["sums"])) == 1, "processes hold different models"
        losses = torch.tensor(of_two[hook]["losses"], dtype=torch.float64)
        gaps.append((losses - exact).abs())
    fp16, bf16, powersgd = gaps
    for gap in (fp16, bf16):  # rounding, which training amplifies
        assert 1e-9 < gap[:8].max() < 1e-4
        assert gap.max() < 0.1
    assert powersgd[:10].max() < 1e-9, "PowerSGD starts after ten steps"
    assert 1e-9 < powersgd.max() < 0.5
