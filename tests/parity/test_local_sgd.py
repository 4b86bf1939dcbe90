"""Local SGD equals DDP, plain training and torch's PostLocalSGDOptimizer where it should, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.cases import train_cases
from tests.harness.reference import TOLERANCE

OWN = "every=4,start=6"
PLAIN = "optim.momentum=0,optim.lr=0.3"


def find_gap(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference between losses, parameters and scores of two trainings, of which the first has learned."""
    assert len(one["losses"]) == len(other["losses"]) == 26 and one["losses"][-1] < 0.9 * one["losses"][0]
    assert one["state"].keys() == other["state"].keys() and one["scores"].keys() == other["scores"].keys()
    gaps = [abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True)]
    gaps += [(value - other["state"][name]).abs().max().item() for name, value in one["state"].items()]
    return max(*gaps, *(abs(value - other["scores"][name]) for name, value in one["scores"].items()))


@pytest.mark.parametrize("workers", [2, 3])
def test_an_exchange_after_each_step_equals_ddp_and_own_momentum_equals_torch(
    workers: int, tmp_path: Path, cache: Path
) -> None:
    """A step is linear in gradient and momentum: so the mean of the workers' own momenta is that of DDP, too."""
    averaged, anew, plain, own = (
        "every=1,momentum_of=averaged",
        "every=1,momentum_of=reset",
        f"every=1,{PLAIN}",
        f"torch,{OWN}",
    )
    cases = [averaged, "every=1", anew, plain, OWN, "every=4", "ddp,seed=0", f"ddp,{PLAIN}", own]
    found = train_cases("local_sgd", tmp_path, cache, workers, cases)
    assert find_gap(found[averaged], found["ddp,seed=0"]) <= TOLERANCE
    assert find_gap(found["every=1"], found["ddp,seed=0"]) <= TOLERANCE
    assert find_gap(found[plain], found[f"ddp,{PLAIN}"]) <= TOLERANCE
    assert find_gap(found[OWN], found[own]) <= 1e-12
    # the comparison sees momentum that begins anew, and synchronous steps that are left out
    assert find_gap(found["ddp,seed=0"], found[anew]) > 1e-6
    assert find_gap(found[own], found["every=4"]) > 1e-6


def test_one_worker_equals_plain_training_for_any_round(tmp_path: Path, cache: Path) -> None:
    same = ["every=3", "every=7,start=4", "every=5,momentum_of=averaged", "every=6,delay=4"]
    others = [
        "every=3,outer=nesterov",
        "every=3,outer_lr=0.5",
        "every=3,momentum_of=reset",
        "every=3,delay=1,outer_lr=0.5",
    ]
    found = train_cases("local_sgd", tmp_path, cache, 1, ["ddp,seed=0", *same, *others])
    assert max(find_gap(found[case], found["ddp,seed=0"]) for case in same) <= TOLERANCE
    assert min(find_gap(found["ddp,seed=0"], found[case]) for case in others) > 1e-6
