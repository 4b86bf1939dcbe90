"""One case of each engine equals the unsplit model in one process, in float64, to 1e-9.

tests/parity has all other cases; those of accumulation are in test_amp.py.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.harness.parity.ddp_cases import DDP
from tests.harness.parity.driver import train_cases
from tests.harness.parity.method import run_reference
from tests.harness.parity.reference import list_differences, list_loss_differences
from tests.harness.parity.stage_cases import PIPELINE, RESNET

GPIPE = "engine=own,schedule=gpipe,stages=2,microbatches=6"
LIBRARY = "engine=torch,schedule=1f1b,stages=2,microbatches=6"
PIPELINED_RESNET = "schedule=gpipe,stages=2,split=[layer3_0]"
DDP_CASE = "strategy=ddp,steps=15"
FSDP_CASE = "strategy=fsdp,steps=15"
SYNCED = "model=resnet18,sync_batchnorm=true,steps=6"
UNEQUAL = f"{DDP_CASE},shards=[3,1]"


@pytest.mark.parametrize("losses", [[1.0, math.nan, 1.0], [math.nan, 1.0, 1.0], [1.0, 1.0, 2.0], []])
def test_nan_and_missing_losses_differ_from_the_reference(losses: list[float]) -> None:
    correct = {"losses": [1.0, 1.0, 1.0], "state": {}, "scores": {}}
    assert list_differences(correct, correct) == []
    differences = list_differences(correct | {"losses": losses}, correct)
    assert any(line.startswith("losses by") for line in differences)


def test_both_pipeline_engines_equal_the_unsplit_model(tmp_path: Path, cache: Path) -> None:
    mistaken = f"lose_microbatch,{GPIPE}"
    outcomes = train_cases(PIPELINE, tmp_path, cache, 2, [GPIPE, LIBRARY, mistaken])
    unsplit = run_reference(PIPELINE, cache, "stages=1")
    assert unsplit["losses"][-1] < 0.9 * unsplit["losses"][0], "without progress the comparison proves nothing"
    assert list_differences(outcomes[GPIPE], unsplit) == []
    assert list_differences(outcomes[LIBRARY], unsplit) == []
    assert list_loss_differences(outcomes[mistaken], unsplit)


def test_a_pipelined_resnet_equals_the_unsplit_one_fed_the_same_microbatches(tmp_path: Path, cache: Path) -> None:
    mistaken = f"lose_microbatch,{PIPELINED_RESNET}"
    outcomes = train_cases(RESNET, tmp_path, cache, 2, [PIPELINED_RESNET, mistaken])
    unsplit = run_reference(RESNET, cache, "mode=single,split_size=2")
    assert list_differences(outcomes[PIPELINED_RESNET], unsplit) == []
    assert list_loss_differences(outcomes[mistaken], unsplit)


def test_ddp_fsdp_and_synchronised_norms_equal_one_process(tmp_path: Path, cache: Path) -> None:
    mistaken = f"sums_losses,{DDP_CASE},clip=0"
    outcomes = train_cases(DDP, tmp_path, cache, 2, [DDP_CASE, FSDP_CASE, SYNCED, UNEQUAL, mistaken])
    reference_cases = {DDP_CASE: DDP_CASE, FSDP_CASE: FSDP_CASE, SYNCED: SYNCED, UNEQUAL: DDP_CASE}
    for case, reference_case in reference_cases.items():
        reference_run = run_reference(DDP, cache, reference_case)
        assert list_differences(outcomes[case], reference_run) == [], case
    not_clipped = run_reference(DDP, cache, f"{DDP_CASE},clip=0")
    assert list_loss_differences(outcomes[mistaken], not_clipped)
