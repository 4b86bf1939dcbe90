"""Local SGD equals DDP, plain training and torch's PostLocalSGDOptimizer where it should, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.environment.randomness import draw_cases
from tests.harness.parity.driver import train_cases
from tests.harness.parity.local_sgd_cases import LOCAL_SGD
from tests.harness.parity.reference import TOLERANCE

DDP = "ddp"
DELAYED_START = "every=4,start=6"
REGULARIZATION = "clip=1,dropout=0.1"
PLAIN_SGD = "optim.momentum=0,optim.lr=0.3"


def find_gap(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Return the largest difference between losses, parameters and scores. The first training must have learned."""
    assert len(first["losses"]) == 26
    assert len(second["losses"]) == 26
    assert first["losses"][-1] < 0.9 * first["losses"][0]
    assert first["state"].keys() == second["state"].keys()
    assert first["scores"].keys() == second["scores"].keys()
    gaps = [abs(a - b) for a, b in zip(first["losses"], second["losses"], strict=True)]
    for name, tensor in first["state"].items():
        gaps.append((tensor - second["state"][name]).abs().max().item())
    for name, score in first["scores"].items():
        gaps.append(abs(score - second["scores"][name]))
    return max(gaps)


@pytest.mark.parametrize("workers", draw_cases("workers", [2, 3], 1))
def test_an_exchange_after_each_step_equals_ddp_and_own_momentum_equals_torch(
    workers: int, tmp_path: Path, cache: Path
) -> None:
    """A step is linear in gradient and momentum, so the mean of the workers' momenta equals the momentum of DDP."""
    averaged = "every=1,momentum_of=averaged"
    reset = "every=1,momentum_of=reset"
    plain_sgd = f"every=1,{PLAIN_SGD},dropout=0.1"
    ddp_sgd = f"ddp,{PLAIN_SGD},dropout=0.1"
    torch_optimizer = f"torch,{DELAYED_START}"
    local_cases = [averaged, "every=1", reset, plain_sgd, DELAYED_START, "every=4"]
    cases = [*local_cases, DDP, ddp_sgd, torch_optimizer]
    outcomes = train_cases(LOCAL_SGD, tmp_path, cache, workers, cases)
    assert find_gap(outcomes[averaged], outcomes[DDP]) <= TOLERANCE
    assert find_gap(outcomes["every=1"], outcomes[DDP]) <= TOLERANCE
    assert find_gap(outcomes[plain_sgd], outcomes[ddp_sgd]) <= TOLERANCE
    assert find_gap(outcomes[DELAYED_START], outcomes[torch_optimizer]) <= 1e-12
    # the comparison sees momentum that is reset, and synchronous steps that are left out
    assert find_gap(outcomes[DDP], outcomes[reset]) > 1e-6
    assert find_gap(outcomes[torch_optimizer], outcomes["every=4"]) > 1e-6


def test_one_worker_equals_plain_training_for_any_round(tmp_path: Path, cache: Path) -> None:
    equal_cases = ["every=3", "every=7,start=4", "every=5,momentum_of=averaged", "every=6,delay=4"]
    unequal_cases = [
        "every=3,outer=nesterov",
        "every=3,outer_lr=0.5",
        "every=3,momentum_of=reset",
        "every=3,delay=1,outer_lr=0.5",
    ]
    regularized = [f"ddp,{REGULARIZATION}", f"every=7,start=4,{REGULARIZATION}"]
    outcomes = train_cases(LOCAL_SGD, tmp_path, cache, 1, [DDP, *equal_cases, *unequal_cases, *regularized])
    assert find_gap(*(outcomes[case] for case in regularized)) <= TOLERANCE
    assert find_gap(outcomes[DDP], outcomes[regularized[0]]) > 1e-6
    for case in equal_cases:
        assert find_gap(outcomes[case], outcomes[DDP]) <= TOLERANCE, case
    for case in unequal_cases:
        assert find_gap(outcomes[DDP], outcomes[case]) > 1e-6, case
