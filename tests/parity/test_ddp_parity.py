"""Data parallelism equals one process, in float64, to 1e-9: losses, parameters, buffers, evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.cases import train_cases
from tests.harness.ddp_parity import expected, wrong
from tests.harness.shared import make_once

DDP = ["strategy=ddp", "gradient_as_bucket_view=false,bucket_mb=25", "static_graph=true", "find_unused_parameters=true"]
MISTAKES = ("sums_losses", "no_communication", "same_share")
SLOW = "slow_rank,steps=25"
GENTLE = "optim.lr=0.05"  # with long steps the training itself makes much of a little rounding
HOOKS = [f"communication={name},{GENTLE}" for name in ("fp16", "bf16", "powersgd")]
CONVNET = "model=convnet"
SYNCED = "model=resnet18,sync_batchnorm=true"
APART = "model=resnet18"
BRIEF = f"{SYNCED},steps=10"


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, Any]:
    """Every ConvNet case of two processes, the right ones and the mistakes."""
    cases = ["strategy=fsdp", *DDP, *(f"{mistake},clip=0" for mistake in MISTAKES), SLOW, *HOOKS]
    folder = make_once(tmp_path_factory, "ddp-of-two", lambda path: train_cases("ddp_parity", path, cache, 2, cases))
    return dict(torch.load(folder / "results-2.pt", weights_only=True))


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_ddp_and_fsdp_of_the_convnet_equal_one_process(
    processes: int, tmp_path: Path, cache: Path, request: pytest.FixtureRequest
) -> None:
    right = expected(cache, CONVNET)
    cases = ["strategy=fsdp", *(DDP if processes == 2 else DDP[:1])]
    shared = (
        request.getfixturevalue("of_two")
        if processes == 2
        else train_cases("ddp_parity", tmp_path, cache, processes, cases)
    )
    found = {case: wrong(shared[case], right) for case in cases}
    assert not {case: differing for case, differing in found.items() if differing}
    assert len(right["losses"]) == 30
    assert right["losses"][-1] < 0.9 * right["losses"][0], "a model that learns nothing proves nothing"


def test_resnet_equals_one_process_with_and_without_synchronised_norms(tmp_path: Path, cache: Path) -> None:
    trained = train_cases("ddp_parity", tmp_path, cache, 2, [SYNCED, APART, f"{BRIEF},strategy=fsdp"])
    assert wrong(trained[SYNCED], expected(cache, SYNCED)) == []
    assert wrong(trained[f"{BRIEF},strategy=fsdp"], expected(cache, BRIEF)) == []
    assert wrong(trained[APART], expected(cache, APART, shares=2)) == []
    # the check sees norms that are not synchronised, and buffers before the processes agreed on them
    assert any("losses" in difference for difference in wrong(trained[APART], expected(cache, SYNCED)))
    early = wrong(trained[APART] | {"state": trained[APART]["before"]}, expected(cache, APART, shares=2))
    assert early
    assert all("running_" in difference for difference in early)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_check_sees_mistakes_of_data_parallelism(mistake: str, cache: Path, of_two: dict[str, Any]) -> None:
    found = wrong(of_two[f"{mistake},clip=0"], expected(cache, "clip=0"))
    assert any("losses" in difference for difference in found)


def test_a_slow_process_is_named_as_the_straggler(of_two: dict[str, Any]) -> None:
    assert of_two[SLOW]["straggler"] == 1
    # Rank 1 sleeps for 0.1 s in each forward pass, so rank 0 waits after its last gradient until backward can end.
    assert of_two[SLOW]["exposed"] > 0.05


def test_communication_hooks_lose_only_digits(cache: Path, of_two: dict[str, Any]) -> None:
    exact = torch.tensor(expected(cache, GENTLE)["losses"], dtype=torch.float64)
    gaps = [(torch.tensor(of_two[hook]["losses"], dtype=torch.float64) - exact).abs() for hook in HOOKS]
    assert all(len(set(of_two[hook]["sums"])) == 1 for hook in HOOKS), "processes hold different models"
    for gap in gaps[:2]:  # rounding that training then makes larger
        assert 1e-9 < gap[:8].max() < 1e-4
        assert gap.max() < 0.1
    assert gaps[2][:10].max() < 1e-9 < gaps[2].max() < 0.5, "PowerSGD begins after ten steps"
