"""Local SGD equals DDP, plain training and torch's PostLocalSGDOptimizer where it should, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.cases import train_cases
from tests.harness.reference import TOLERANCE

OWN = "every=4,start=6"
PLAIN = "optim.momentum=0,optim.lr=0.3"


def find_gap(first: dict[str, Any], second: dict[str, Any]) -> float:
    """The largest difference between losses, parameters and scores of two trainings, of which the first has learned."""
    assert len(first["losses"]) == 26
    assert len(second["losses"]) == 26
    assert first["losses"][-1] < 0.9 * first["losses"][0]
    assert first["state"].keys() == second["state"].keys()
    assert first["scores"].keys() == second["scores"].keys()
    gaps = [abs(a - b) for a, b in zip(first["losses"], second["losses"], strict=True)]
    gaps += [(value - second["state"][name]).abs().max().item() for name, value in first["state"].items()]
    return max(*gaps, *(abs(value - second["scores"][name]) for name, value in first["scores"].items()))


@pytest.mark.parametrize("workers", [2, 3])
def test_an_exchange_after_each_step_equals_ddp_and_own_momentum_equals_torch(
    workers: int, tmp_path: Path, cache: Path
) -> None:
    """A step is linear in gradient and momentum: so the mean of the workers' own momenta is that of DDP, too."""
    averaged = "every=1,momentum_of=averaged"
    anew = "every=1,momentum_of=reset"
    plain = f"every=1,{PLAIN}"
    own = f"torch,{OWN}"
    cases = [averaged, "every=1", anew, plain, OWN, "every=4", "ddp,seed=0", f"ddp,{PLAIN}", own]
    trained = train_cases("local_sgd", tmp_path, cache, workers, cases)
    assert find_gap(trained[averaged], trained["ddp,seed=0"]) <= TOLERANCE
    assert find_gap(trained["every=1"], trained["ddp,seed=0"]) <= TOLERANCE
    assert find_gap(trained[plain], trained[f"ddp,{PLAIN}"]) <= TOLERANCE
    assert find_gap(trained[OWN], trained[own]) <= 1e-12
    # the comparison sees momentum that begins anew, and synchronous steps that are left out
    assert find_gap(trained["ddp,seed=0"], trained[anew]) > 1e-6
    assert find_gap(trained[own], trained["every=4"]) > 1e-6


def test_one_worker_equals_plain_training_for_any_round(tmp_path: Path, cache: Path) -> None:
    equal_cases = ["every=3", "every=7,start=4", "every=5,momentum_of=averaged", "every=6,delay=4"]
    unequal_cases = [
        "every=3,outer=nesterov",
        "every=3,outer_lr=0.5",
        "every=3,momentum_of=reset",
        "every=3,delay=1,outer_lr=0.5",
    ]
    trained = train_cases("local_sgd", tmp_path, cache, 1, ["ddp,seed=0", *equal_cases, *unequal_cases])
    assert max(find_gap(trained[case], trained["ddp,seed=0"]) for case in equal_cases) <= TOLERANCE
    assert min(find_gap(trained["ddp,seed=0"], trained[case]) for case in unequal_cases) > 1e-6
