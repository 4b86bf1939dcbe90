"""The formulas of ddp_multinode for memory and messages equal measurements, for each strategy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.environment.randomness import draw_cases
from tests.harness.parity.ddp_cases import DDP
from tests.harness.parity.driver import train_cases
from tests.harness.parity.rank_formulas import list_rank_formula_gaps

SETTINGS = "log.memory=1,steps=1,epochs=1,optim.warmup=0,clip=0"
CASES = {
    2: """
        optim.momentum=0
        optim.name=adam,bucket_mb=25
        zero1=true,optim.name=adamw
        communication=fp16
        communication=powersgd,epochs=3,log.memory=10,steps=10
        communication=powersgd,epochs=3,log.memory=9,steps=10
        communication=bf16
        strategy=fsdp,optim.name=adam
        strategy=fsdp,reshard=false
        strategy=fsdp,model=resnet18,sync_batchnorm=true
        model=resnet18,zero1=true
        model=resnet18,sync_batchnorm=true
        model=resnet18,sync_batchnorm=true,recompute=blocks
    """,
    4: """
        zero1=true
        strategy=fsdp
        strategy=fsdp,fsdp=2
        strategy=fsdp,fsdp=2,reshard=false
    """,
}
"""Cases by number of ranks, one in each line."""
DRAWN_CASES = 3
TOLERANCES = {"state": 0.0, "sent": 0.001}
"""Largest relative differences. DDP also sends the order of its buckets in the first step."""


@pytest.mark.parametrize("ranks", CASES)
def test_memory_and_messages_equal_the_formulas(ranks: int, tmp_path: Path, cache: Path) -> None:
    drawn = draw_cases(f"ddp-formulas-{ranks}", CASES[ranks].split(), DRAWN_CASES)
    cases = [f"{SETTINGS},{case}" for case in drawn]
    outcomes = train_cases(DDP, tmp_path, cache, ranks, cases)
    assert list(outcomes) == cases
    for case, outcome in outcomes.items():
        result = outcome["result"]
        assert list_rank_formula_gaps(result, TOLERANCES) == [], case
        expected_share = None if "recompute" in case else [1 / ranks] * ranks
        assert result.get("rank_sample_share") == expected_share, case


def test_a_shard_keeps_its_part_of_the_activations(tmp_path: Path, cache: Path) -> None:
    case = SETTINGS
    (process,) = train_cases(DDP, tmp_path, cache, 1, [case])[case]["result"]["rank_activation_bytes"]
    result = train_cases(DDP, tmp_path, cache, 2, [f"{case},shards=[3,1]"]).popitem()[1]["result"]
    assert result["rank_sample_share"] == [0.75, 0.25]
    expected = [share * process for share in result["rank_sample_share"]]
    assert result["rank_activation_bytes"] == pytest.approx(expected, rel=0.05)
