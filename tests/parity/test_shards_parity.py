"""Unequal shards, also empty ones, equal one process, in float64, to 1e-9; mistakes are noticed.

Shards of 3:1 are in tests/experiments/test_parity_of_engines.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.environment.shared_results import create_folder_once
from tests.harness.parity.amp_cases import AMP
from tests.harness.parity.ddp_cases import DDP, SLOWDOWN_STEP
from tests.harness.parity.driver import load_outcomes, train_cases
from tests.harness.parity.method import run_reference
from tests.harness.parity.reference import list_differences, list_loss_differences

BRIEF = "steps=10"
NOT_SYNCED = "model=resnet18,steps=3"
SYNCED = "model=resnet18,sync_batchnorm=true,steps=3"
OF_TWO = [f"shards=[0,1],{BRIEF}"]
OF_THREE = [
    f"shards=[5,2,1],{BRIEF}",
    f"shards=[2,0,1],{BRIEF}",
    f"shards=[5,2,1],batch=25,optim.base_batch=25,{BRIEF}",
]
NORMS = {
    f"shards=[3,1],{NOT_SYNCED}": (3, 1),
    f"shards=[0,1],{NOT_SYNCED}": (0, 4),
    f"shards=[0,1],strategy=fsdp,{NOT_SYNCED}": (0, 4),
}
MISTAKES = (f"mean_of_means,shards=[3,1],{BRIEF}", f"equal_buffers,shards=[3,1],{NOT_SYNCED}")


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, Any]:
    """The results of every case of two ranks, correct ones and mistakes."""
    cases = [*OF_TWO, *NORMS, f"shards=[0,1],{SYNCED}", *MISTAKES]
    folder = create_folder_once(tmp_path_factory, "shards-of-two", lambda path: train_cases(DDP, path, cache, 2, cases))
    return load_outcomes(folder, 2)


def test_two_ranks_with_unequal_shards_equal_one_process(cache: Path, of_two: dict[str, Any]) -> None:
    reference_run = run_reference(DDP, cache, BRIEF)
    for case in OF_TWO:
        assert list_differences(of_two[case], reference_run) == [], case


def test_three_ranks_with_unequal_shards_equal_one_process(tmp_path: Path, cache: Path) -> None:
    outcomes = train_cases(DDP, tmp_path, cache, 3, OF_THREE)
    for case in OF_THREE:
        _, single_process = case.split("],")
        reference_run = run_reference(DDP, cache, single_process)
        assert list_differences(outcomes[case], reference_run) == [], case


def test_synchronised_norms_count_samples_and_other_norms_are_averaged_by_samples(
    cache: Path, of_two: dict[str, Any]
) -> None:
    synced_run = run_reference(DDP, cache, SYNCED)
    assert list_differences(of_two[f"shards=[0,1],{SYNCED}"], synced_run) == []
    for case, shard_sizes in NORMS.items():
        reference_run = run_reference(DDP, cache, NOT_SYNCED, shard_sizes)
        assert list_differences(of_two[case], reference_run) == [], case
    not_synced = of_two[f"shards=[3,1],{NOT_SYNCED}"]
    assert list_loss_differences(not_synced, synced_run), "norms that are not synchronised see other samples"


def test_the_mean_of_unequal_shards_means_is_another_gradient(cache: Path, of_two: dict[str, Any]) -> None:
    assert list_loss_differences(of_two[MISTAKES[0]], run_reference(DDP, cache, BRIEF))


def test_buffers_of_unequal_shards_have_different_weights(cache: Path, of_two: dict[str, Any]) -> None:
    reference_run = run_reference(DDP, cache, NOT_SYNCED, (3, 1))
    differences = list_differences(of_two[MISTAKES[1]], reference_run)
    assert any("running_" in difference for difference in differences)


def test_accumulated_microbatches_in_unequal_shards_equal_one_process(tmp_path: Path, cache: Path) -> None:
    plan = {
        2: ["shards=[3,1],accumulate=4", "shards=[0,1],accumulate=4,no_sync=false"],
        3: ["shards=[5,2,1],accumulate=3"],
    }
    for ranks, cases in plan.items():
        outcomes = train_cases(AMP, tmp_path, cache, ranks, cases)
        for case in cases:
            single_process = case[case.index("accumulate") :]
            reference_run = run_reference(AMP, cache, single_process)
            assert list_differences(outcomes[case], reference_run) == [], case


@pytest.mark.parametrize("change", ["data.augment=crop_flip", "dropout=0.3"])
def test_random_changes_of_a_sample_do_not_depend_on_shards(change: str, tmp_path: Path, cache: Path) -> None:
    changed = f"{change},{BRIEF}"
    single_process = train_cases(DDP, tmp_path, cache, 1, [changed])[changed]
    for ranks, shards in ((2, "[3,1]"), (3, "[5,2,1]")):
        case = f"shards={shards},{changed}"
        outcome = train_cases(DDP, tmp_path, cache, ranks, [case])[case]
        assert list_differences(outcome, single_process) == [], shards
    assert list_differences(single_process, run_reference(DDP, cache, BRIEF)), "the setting changes nothing"


def test_torchs_dropout_is_another_one_with_other_ranks(tmp_path: Path, cache: Path) -> None:
    case = f"torchs_dropout,dropout=0.3,{BRIEF}"
    single_process = train_cases(DDP, tmp_path, cache, 1, [case])[case]
    two_ranks = train_cases(DDP, tmp_path, cache, 2, [case])[case]
    assert list_loss_differences(two_ranks, single_process)


def test_dropout_is_the_same_in_shards_and_microbatches(tmp_path: Path, cache: Path) -> None:
    changed = "dropout=0.3,data.train_limit=480"
    cases = [f"accumulate={count},{changed}" for count in (1, 4)]
    single_process, accumulated = train_cases(AMP, tmp_path, cache, 1, cases).values()
    sharded_case = f"shards=[3,1],{cases[1]}"
    sharded = train_cases(AMP, tmp_path, cache, 2, [sharded_case])[sharded_case]
    assert list_differences(accumulated, single_process) == []
    assert list_differences(sharded, single_process) == []
    without_dropout = run_reference(AMP, cache, "accumulate=1,data.train_limit=480")
    assert list_differences(single_process, without_dropout), "dropout changes nothing"


def test_shards_that_adapt_to_a_slow_rank_change_nothing_else(tmp_path: Path, cache: Path) -> None:
    long = "steps=45,epochs=12"
    case = f"slows_down,shards=auto,{long}"
    outcome = train_cases(DDP, tmp_path, cache, 2, [case])[case]
    assert list_differences(outcome, run_reference(DDP, cache, long)) == []
    shards = outcome["shards"]
    rows = [row for row in outcome["rows"] if "shard_0" in row]
    shards_in_metrics = [(row["global_step"] + 1, (row["shard_0"], row["shard_1"])) for row in rows]
    assert shards_in_metrics == shards, "metrics.jsonl has each change"
    (step, (first, second)) = shards[-1]
    assert step <= SLOWDOWN_STEP + 31, shards  # earlier only if the rank was also slow by chance
    assert second < 6 < first, shards
