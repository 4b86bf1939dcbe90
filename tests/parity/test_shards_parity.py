"""Unequal shards, also empty ones, equal one process, in float64, to 1e-9; mistakes are noticed.

Shards of 3:1 are in tests/experiments/test_parity_of_engines.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.environment.shared_results import create_folder_once
from tests.harness.parity import amp_cases, ddp_cases
from tests.harness.parity.cases import train_cases
from tests.harness.parity.ddp_cases import wrong
from tests.harness.parity.reference import differences

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
    folder = create_folder_once(
        tmp_path_factory, "shards-of-two", lambda path: train_cases("ddp_cases", path, cache, 2, cases)
    )
    return dict(torch.load(folder / "results-2.pt", weights_only=True))


def test_two_ranks_with_unequal_shards_equal_one_process(cache: Path, of_two: dict[str, Any]) -> None:
    for case in OF_TWO:
        assert wrong(of_two[case], ddp_cases.expected(cache, BRIEF)) == [], case


def test_three_ranks_with_unequal_shards_equal_one_process(tmp_path: Path, cache: Path) -> None:
    trained = train_cases("ddp_cases", tmp_path, cache, 3, OF_THREE)
    for case in OF_THREE:
        single_process = f"processes_per_node=1,{case[case.index(']') + 2 :]}"
        assert wrong(trained[case], ddp_cases.expected(cache, single_process)) == [], case


def test_synchronised_norms_count_samples_and_other_norms_are_averaged_by_samples(
    cache: Path, of_two: dict[str, Any]
) -> None:
    assert wrong(of_two[f"shards=[0,1],{SYNCED}"], ddp_cases.expected(cache, SYNCED)) == []
    for case, counts in NORMS.items():
        assert wrong(of_two[case], ddp_cases.expected(cache, NOT_SYNCED, counts)) == [], case
    differing = wrong(of_two[f"shards=[3,1],{NOT_SYNCED}"], ddp_cases.expected(cache, SYNCED))
    assert any("losses" in difference for difference in differing), "norms that are not synchronised see other samples"


def test_the_mean_of_unequal_shards_means_is_another_gradient(cache: Path, of_two: dict[str, Any]) -> None:
    trained = wrong(of_two[MISTAKES[0]], ddp_cases.expected(cache, BRIEF))
    assert any("losses" in difference for difference in trained)


def test_buffers_of_unequal_shards_have_different_weights(cache: Path, of_two: dict[str, Any]) -> None:
    trained = wrong(of_two[MISTAKES[1]], ddp_cases.expected(cache, NOT_SYNCED, (3, 1)))
    assert any("running_" in difference for difference in trained)


def test_accumulated_microbatches_in_unequal_shards_equal_one_process(tmp_path: Path, cache: Path) -> None:
    plan = {
        2: ["shards=[3,1],accumulate=4", "shards=[0,1],accumulate=4,no_sync=false"],
        3: ["shards=[5,2,1],accumulate=3"],
    }
    for ranks, cases in plan.items():
        trained = train_cases("amp_cases", tmp_path, cache, ranks, cases)
        for case in cases:
            single_process = case[case.index("accumulate") :]
            assert differences(trained[case], amp_cases.expected(cache, single_process)) == [], case


@pytest.mark.parametrize("change", ["data.augment=crop_flip", "dropout=0.3"])
def test_random_changes_of_a_sample_do_not_depend_on_shards(change: str, tmp_path: Path, cache: Path) -> None:
    changed = f"{change},{BRIEF}"
    single_process = train_cases("ddp_cases", tmp_path, cache, 1, [changed])[changed]
    for ranks, shards in ((2, "[3,1]"), (3, "[5,2,1]")):
        case = f"shards={shards},{changed}"
        trained = train_cases("ddp_cases", tmp_path, cache, ranks, [case])[case]
        assert wrong(trained, single_process) == [], shards
    assert wrong(single_process, ddp_cases.expected(cache, BRIEF)), "the setting changes nothing"


def test_torchs_dropout_is_another_one_with_other_ranks(tmp_path: Path, cache: Path) -> None:
    case = f"torchs_dropout,dropout=0.3,{BRIEF}"
    single_process = train_cases("ddp_cases", tmp_path, cache, 1, [case])[case]
    two_ranks = train_cases("ddp_cases", tmp_path, cache, 2, [case])[case]
    assert any("losses" in difference for difference in wrong(two_ranks, single_process))


def test_dropout_is_the_same_in_shards_and_microbatches(tmp_path: Path, cache: Path) -> None:
    changed = "dropout=0.3,data.train_limit=480"
    cases = [f"accumulate={count},{changed}" for count in (1, 4)]
    single_process, accumulated = train_cases("amp_cases", tmp_path, cache, 1, cases).values()
    sharded_case = f"shards=[3,1],{cases[1]}"
    shared = train_cases("amp_cases", tmp_path, cache, 2, [sharded_case])[sharded_case]
    assert differences(accumulated, single_process) == []
    assert differences(shared, single_process) == []
    without_dropout = amp_cases.expected(cache, "accumulate=1,data.train_limit=480")
    assert differences(single_process, without_dropout), "dropout changes nothing"


def test_shards_that_adapt_to_a_slow_rank_change_nothing_else(tmp_path: Path, cache: Path) -> None:
    long = "steps=45,epochs=12"
    case = f"{ddp_cases.SLOWS_DOWN},shards=auto,{long}"
    trained = train_cases("ddp_cases", tmp_path, cache, 2, [case])[case]
    assert wrong(trained, ddp_cases.expected(cache, long)) == []
    assert trained["written"] == trained["shards"], "metrics.jsonl has each change"
    (step, (first, second)) = trained["shards"][-1]
    assert ddp_cases.SLOW_FROM < step <= ddp_cases.SLOW_FROM + 31, trained["shards"]
    assert second < 6 < first, trained["shards"]
