"""Mistakes with local SGD: what they do, and what this repository does instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands.processes import run_experiment
from tests.harness.environment.shared_results import create_folder_once
from tests.harness.experiments.registry import ENTRY_BY_NAME
from tests.harness.parity.driver import load_outcomes, train_cases
from tests.harness.parity.local_sgd_cases import ADAMW, LOCAL_SGD
from tests.harness.parity.reference import TOLERANCE
from tests.harness.runs.resuming import ONE_THREAD, copy_as_interrupted, find_differences, resume_run

DDP = "ddp"
LOCAL = "every=1"
AVERAGED = "every=1,momentum_of=averaged"
FEW = "steps=12"
CASES = [
    *(DDP, LOCAL, f"sums_momentum,{AVERAGED}", f"momentum_of_rank_0,{AVERAGED}", "every=8", "counts_workers,every=8"),
    *(f"ddp,{ADAMW}", f"{LOCAL},{ADAMW}", f"{AVERAGED},{ADAMW}"),
    *(f"ddp,{ADAMW},{FEW}", f"averages_first_moments,{AVERAGED},{ADAMW},{FEW}"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, Any]:
    """The training of two workers, by case."""

    def train(folder: Path) -> None:
        train_cases(LOCAL_SGD, folder, cache, 2, CASES)

    return load_outcomes(create_folder_once(tmp_path_factory, "local-mistakes", train), 2)


def compute_distance(training: dict[str, Any], reference: dict[str, Any]) -> float:
    """Return the largest difference between parameters."""
    expected = reference["state"]
    return max((tensor - expected[name]).abs().max().item() for name, tensor in training["state"].items())


@pytest.mark.slow
def test_momentum_is_averaged_neither_by_a_sum_nor_by_that_of_rank_0(trained: dict[str, Any]) -> None:
    ddp = trained[DDP]
    assert compute_distance(trained[LOCAL], ddp) <= TOLERANCE, "a step is linear in the momentum, which may stay local"
    assert compute_distance(trained[f"momentum_of_rank_0,{AVERAGED}"], ddp) > 0.01, "the momentum of one shard"
    losses = trained[f"sums_momentum,{AVERAGED}"]["losses"]
    assert losses[-1] > 100 * losses[0], "the momentum doubles in each step"


def test_averaging_second_moments_brings_adamw_no_nearer_to_ddp(trained: dict[str, Any]) -> None:
    ddp = trained[f"ddp,{ADAMW}"]
    local = trained[f"{LOCAL},{ADAMW}"]
    averaged = trained[f"{AVERAGED},{ADAMW}"]
    assert compute_distance(averaged, ddp) > 0.5 * compute_distance(local, ddp) > 0.005
    assert averaged["counts"][1] == 3 * local["counts"][1], "averaging sends three times the bytes"


def test_averaging_first_moments_alone_diverges(trained: dict[str, Any]) -> None:
    ddp_losses = trained[f"ddp,{ADAMW},{FEW}"]["losses"]
    losses = trained[f"averages_first_moments,{AVERAGED},{ADAMW},{FEW}"]["losses"]
    assert max(ddp_losses) < 10 * ddp_losses[0]
    assert max(losses) > 10 * ddp_losses[0], "a mean is divided by the root of a local second moment near 0"


def test_a_round_counts_the_steps_of_the_job_not_those_of_all_workers(trained: dict[str, Any]) -> None:
    assert trained["every=8"]["counts"][0] == 4, "after steps 8, 16, 24 and 26"
    assert trained["counts_workers,every=8"]["counts"][0] == 7, "p workers exchange p times as often"


def test_between_two_exchanges_the_mean_is_not_the_state_of_the_workers(tmp_path: Path, quick: tuple[str, ...]) -> None:
    whole = run_experiment("local_sgd", *quick, ONE_THREAD, "model=mlp", "steps=20", runs=tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    folder = copy_as_interrupted(whole.folder, 12, tmp_path / "cut")
    completed = resume_run(
        ENTRY_BY_NAME["local_sgd"], folder, disabled_protection="tests.harness.parity.local_sgd_cases:drop_own_state"
    )
    assert completed.returncode == 0, completed.stderr
    assert find_differences(folder, whole.folder), "the resumed run differs, without an error"
