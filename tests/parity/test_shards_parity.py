"""Unequal shards equal one process, in float64, to 1e-9, also those of ranks without a sample; what a mistake does.

Those of 3:1 are in tests/experiments/test_parity_of_engines.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import amp_parity, ddp_parity
from tests.harness.cases import train_cases
from tests.harness.ddp_parity import wrong
from tests.harness.reference import differences
from tests.harness.shared import make_once

BRIEF = "steps=10"
APART = "model=resnet18,steps=3"
SYNCED = "model=resnet18,sync_batchnorm=true,steps=3"
OF_TWO = [f"shards=[0,1],{BRIEF}"]
OF_THREE = [
    f"shards=[5,2,1],{BRIEF}",
    f"shards=[2,0,1],{BRIEF}",
    f"shards=[5,2,1],batch=25,optim.base_batch=25,{BRIEF}",
]
NORMS = {
    f"shards=[3,1],{APART}": (3, 1),
    f"shards=[0,1],{APART}": (0, 4),
    f"shards=[0,1],strategy=fsdp,{APART}": (0, 4),
}
MISTAKES = (f"mean_of_means,shards=[3,1],{BRIEF}", f"equal_buffers,shards=[3,1],{APART}")


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, Any]:
    """Every case of two ranks, the right ones and the mistakes."""
    wanted = [*OF_TWO, *NORMS, f"shards=[0,1],{SYNCED}", *MISTAKES]
    folder = make_once(
        tmp_path_factory, "shards-of-two", lambda path: train_cases("ddp_parity", path, cache, 2, wanted)
    )
    return dict(torch.load(folder / "results-2.pt", weights_only=True))


def test_two_ranks_with_unequal_shards_equal_one_process(cache: Path, of_two: dict[str, Any]) -> None:
    for case in OF_TWO:
        assert wrong(of_two[case], ddp_parity.expected(cache, BRIEF)) == [], case


def test_three_ranks_with_unequal_shards_equal_one_process(tmp_path: Path, cache: Path) -> None:
    trained = train_cases("ddp_parity", tmp_path, cache, 3, OF_THREE)
    for case in OF_THREE:
        single_process = f"processes_per_node=1,{case[case.index(']') + 2 :]}"
        assert wrong(trained[case], ddp_parity.expected(cache, single_process)) == [], case


def test_synchronised_norms_count_samples_and_others_are_averaged_by_them(cache: Path, of_two: dict[str, Any]) -> None:
    assert wrong(of_two[f"shards=[0,1],{SYNCED}"], ddp_parity.expected(cache, SYNCED)) == []
    for case, counts in NORMS.items():
        assert wrong(of_two[case], ddp_parity.expected(cache, APART, counts)) == [], case
    apart = wrong(of_two[f"shards=[3,1],{APART}"], ddp_parity.expected(cache, SYNCED))
    assert any("losses" in difference for difference in apart), "not synchronised, they see other samples"


def test_the_mean_of_unequal_shards_means_is_another_gradient(cache: Path, of_two: dict[str, Any]) -> None:
    trained = wrong(of_two[MISTAKES[0]], ddp_parity.expected(cache, BRIEF))
    assert any("losses" in difference for difference in trained)


def test_buffers_of_unequal_shards_do_not_count_alike(cache: Path, of_two: dict[str, Any]) -> None:
    trained = wrong(of_two[MISTAKES[1]], ddp_parity.expected(cache, APART, (3, 1)))
    assert any("running_" in difference for difference in trained)


def test_accumulated_microbatches_in_unequal_shards_equal_one_process(tmp_path: Path, cache: Path) -> None:
    plan = {
        2: ["shards=[3,1],accumulate=4", "shards=[0,1],accumulate=4,no_sync=false"],
        3: ["shards=[5,2,1],accumulate=3"],
    }
    for ranks, cases in plan.items():
        trained = train_cases("amp_parity", tmp_path, cache, ranks, cases)
        for case in cases:
            single_process = case[case.index("accumulate") :]
            assert differences(trained[case], amp_parity.expected(cache, single_process)) == [], case


@pytest.mark.parametrize("change", ["data.augment=crop_flip", "dropout=0.3"])
def test_what_is_drawn_for_a_sample_is_the_same_whatever_the_shards(change: str, tmp_path: Path, cache: Path) -> None:
    changed = f"{change},{BRIEF}"
    (single_process,) = train_cases("ddp_parity", tmp_path, cache, 1, [changed]).values()
    for ranks, shards in ((2, "[3,1]"), (3, "[5,2,1]")):
        (trained,) = train_cases("ddp_parity", tmp_path, cache, ranks, [f"shards={shards},{changed}"]).values()
        assert wrong(trained, single_process) == [], shards
    assert wrong(single_process, ddp_parity.expected(cache, BRIEF)), "it changes something"


def test_torchs_dropout_is_another_one_with_other_ranks(tmp_path: Path, cache: Path) -> None:
    case = f"torchs_dropout,dropout=0.3,{BRIEF}"
    single_process, trained = (train_cases("ddp_parity", tmp_path, cache, ranks, [case])[case] for ranks in (1, 2))
    assert any("losses" in difference for difference in wrong(trained, single_process))


def test_dropout_is_the_same_in_shards_and_microbatches(tmp_path: Path, cache: Path) -> None:
    changed = "dropout=0.3,data.train_limit=480"
    cases = [f"accumulate={count},{changed}" for count in (1, 4)]
    single_process, accumulated = train_cases("amp_parity", tmp_path, cache, 1, cases).values()
    (shared,) = train_cases("amp_parity", tmp_path, cache, 2, [f"shards=[3,1],{cases[1]}"]).values()
    assert differences(accumulated, single_process) == differences(shared, single_process) == []
    assert differences(single_process, amp_parity.expected(cache, "accumulate=1,data.train_limit=480")), (
        "it changes something"
    )


def test_shards_that_follow_a_rank_that_slows_down_change_nothing_else(tmp_path: Path, cache: Path) -> None:
    long = "steps=45,epochs=12"
    case = f"{ddp_parity.SLOWS_DOWN},shards=auto,{long}"
    trained = train_cases("ddp_parity", tmp_path, cache, 2, [case])[case]
    assert wrong(trained, ddp_parity.expected(cache, long)) == []
    assert trained["written"] == trained["shards"], "metrics.jsonl has each change"
    (step, (first, second)) = trained["shards"][-1]
    assert ddp_parity.SLOW_FROM < step <= ddp_parity.SLOW_FROM + 31, trained["shards"]
    assert second < 6 < first, trained["shards"]
