"""One case of each engine equals the unsplit model in one process, in float64, to 1e-9.

tests/parity has all other cases; those of accumulation are in test_amp.py.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.harness.parity import ddp_cases, stage_cases
from tests.harness.parity.cases import train_cases
from tests.harness.parity.ddp_cases import wrong
from tests.harness.parity.reference import differences

GPIPE = "engine=own,schedule=gpipe,stages=2,microbatches=6"
LIBRARY = "engine=torch,schedule=1f1b,stages=2,microbatches=6"
RESNET = "schedule=gpipe,stages=2,split=[layer3_0]"
DDP = "strategy=ddp,steps=15"
FSDP = "strategy=fsdp,steps=15"
SYNCED = "model=resnet18,sync_batchnorm=true,steps=6"
UNEQUAL = f"{DDP},shards=[3,1]"


@pytest.mark.parametrize("losses", [[1.0, math.nan, 1.0], [math.nan, 1.0, 1.0], [1.0, 1.0, 2.0], []])
def test_nan_and_missing_losses_differ_from_the_reference(losses: list[float]) -> None:
    right = {"losses": [1.0, 1.0, 1.0], "state": {}, "scores": {}}
    assert differences(right, right) == []
    assert any(line.startswith("losses by") for line in differences(right | {"losses": losses}, right))


def test_both_pipeline_engines_equal_the_unsplit_model(tmp_path: Path, cache: Path) -> None:
    mistaken = f"lose_microbatch,{GPIPE}"
    trained = train_cases("stage_cases", tmp_path, cache, 2, [GPIPE, LIBRARY, mistaken], "mnist_pipeline")
    right = stage_cases.expected(cache, "mnist_pipeline", "stages=1")
    assert right["losses"][-1] < 0.9 * right["losses"][0], "without progress the comparison proves nothing"
    assert differences(trained[GPIPE], right) == []
    assert differences(trained[LIBRARY], right) == []
    assert any("losses" in difference for difference in differences(trained[mistaken], right))


def test_a_pipelined_resnet_equals_the_unsplit_one_fed_the_same_microbatches(tmp_path: Path, cache: Path) -> None:
    mistaken = f"lose_microbatch,{RESNET}"
    trained = train_cases("stage_cases", tmp_path, cache, 2, [RESNET, mistaken], "resnet_modelparallel")
    right = stage_cases.expected(cache, "resnet_modelparallel", "mode=single,split_size=2")
    assert differences(trained[RESNET], right) == []
    assert any("losses" in difference for difference in differences(trained[mistaken], right))


def test_ddp_fsdp_and_synchronised_norms_equal_one_process(tmp_path: Path, cache: Path) -> None:
    mistaken = f"sums_losses,{DDP},clip=0"
    trained = train_cases("ddp_cases", tmp_path, cache, 2, [DDP, FSDP, SYNCED, UNEQUAL, mistaken])
    for case in (DDP, FSDP, SYNCED, UNEQUAL):
        assert wrong(trained[case], ddp_cases.expected(cache, case)) == [], case
    mistakes = wrong(trained[mistaken], ddp_cases.expected(cache, f"{DDP},clip=0"))
    assert any("losses" in difference for difference in mistakes)
