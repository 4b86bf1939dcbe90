"""The mistakes about local SGD: what they really do, and what stands here instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.cases import train_cases
from tests.harness.local_sgd import ADAMW
from tests.harness.processes import run
from tests.harness.reference import TOLERANCE
from tests.harness.registry import BY_NAME
from tests.harness.resuming import ALONE, cut_off, differences, resume
from tests.harness.shared import make_once

DDP, OWN, AVERAGED = "ddp,seed=0", "every=1", "every=1,momentum_of=averaged"
FEW = "steps=12"
CASES = [
    *(DDP, OWN, f"sums_momentum,{AVERAGED}", f"momentum_of_rank_0,{AVERAGED}", "every=8", "counts_workers,every=8"),
    *(f"ddp,{ADAMW}", f"{OWN},{ADAMW}", f"{AVERAGED},{ADAMW}"),
    *(f"ddp,{ADAMW},{FEW}", f"averages_first_moments,{AVERAGED},{ADAMW},{FEW}"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, Any]:
    """Two workers, with each mistake and without."""
    folder = make_once(tmp_path_factory, "local-mistakes", lambda path: train_cases("local_sgd", path, cache, 2, CASES))
    return dict(torch.load(folder / "results-2.pt", weights_only=True))


def find_gap(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference between parameters."""
    return max((value - other["state"][name]).abs().max().item() for name, value in one["state"].items())


def test_momentum_is_averaged_neither_by_a_sum_nor_by_that_of_rank_0(found: dict[str, Any]) -> None:
    assert find_gap(found[OWN], found[DDP]) <= TOLERANCE, "left local it is right: a step is linear in it"
    assert find_gap(found[f"momentum_of_rank_0,{AVERAGED}"], found[DDP]) > 0.01, "that of one shard"
    summed = found[f"sums_momentum,{AVERAGED}"]["losses"]
    assert summed[-1] > 100 * summed[0], "it grows by twice the momentum in each step"


def test_averaging_second_moments_brings_adamw_no_nearer_to_ddp(found: dict[str, Any]) -> None:
    right, own, averaged = (found[f"{case}{ADAMW}"] for case in ("ddp,", f"{OWN},", f"{AVERAGED},"))
    assert find_gap(averaged, right) > 0.5 * find_gap(own, right) > 0.005
    assert averaged["counts"][1] == 3 * own["counts"][1], "for three times the bytes"


def test_averaging_first_moments_alone_diverges(found: dict[str, Any]) -> None:
    right, wrong = (found[f"{case}{ADAMW},{FEW}"]["losses"] for case in ("ddp,", f"averages_first_moments,{AVERAGED},"))
    assert max(wrong) > 10 * right[0] > max(right), "a mean by the root of a worker's own second moment near 0"


def test_a_round_counts_the_steps_of_the_job_not_those_of_all_workers(found: dict[str, Any]) -> None:
    assert found["every=8"]["counts"][0] == 4, "after steps 8, 16, 24 and 26"
    assert found["counts_workers,every=8"]["counts"][0] == 7, "after every fourth step: with p workers p times as many"


def test_between_two_exchanges_the_mean_is_not_the_state_of_the_workers(tmp_path: Path, quick: tuple[str, ...]) -> None:
    whole = run("local_sgd", *quick, ALONE, "model=mlp", "steps=20", runs=tmp_path / "whole")
    assert whole.status == 0, whole.err
    folder = cut_off(whole.folder, 12, tmp_path / "cut")
    done = resume(BY_NAME["local_sgd"], folder, careless="tests.harness.local_sgd:drop_own_state")
    assert done.returncode == 0, done.stderr
    assert differences(folder, whole.folder), "it goes on without an error, as another training"
