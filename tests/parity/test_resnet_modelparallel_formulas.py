"""The formulas of resnet_modelparallel for memory and messages equal measurements, for each schedule."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.environment.randomness import draw_cases
from tests.harness.parity.driver import train_cases
from tests.harness.parity.rank_formulas import TOLERANCES, list_rank_formula_gaps
from tests.harness.parity.stage_cases import RESNET

SETTINGS = "log.memory=1,steps=1,epochs=1,clip=0,log.gradient_norm=false"
TWO = "stages=2,split=[layer3_0]"
FOUR = "stages=4,split=[layer2_0,layer3_0,layer4_0]"
CASES = {
    1: "mode=single,optim.name=adam",
    2: f"""
        replicas=2,mode=single
        replicas=2,mode=single,zero1=true,optim.name=adam
        mode=naive,{TWO}
        schedule=gpipe,{TWO}
        schedule=1f1b,transport=network,{TWO}
        schedule=1f1b,engine=torch,{TWO}
        recompute=blocks,stages=2,split=[pool]
        schedule=zero_bubble,{TWO}
        schedule=interleaved_1f1b,stages_per_process=2,{FOUR}
        schedule=zbv,stages_per_process=2,{FOUR}
        schedule=dualpipev,stages_per_process=2,{FOUR}
    """,
    4: f"""
        replicas=2,schedule=1f1b,{TWO}
        replicas=2,schedule=1f1b,zero1=true,optim.name=adam,{TWO}
        schedule=1f1b,{FOUR}
    """,
}
"""Cases by number of ranks, one in each line."""
DRAWN_CASES = 3


@pytest.mark.parametrize("ranks", CASES)
def test_memory_and_messages_equal_the_formulas(ranks: int, tmp_path: Path, cache: Path) -> None:
    drawn = draw_cases(f"resnet-formulas-{ranks}", CASES[ranks].split(), DRAWN_CASES)
    cases = [f"{SETTINGS},{case}" for case in drawn]
    outcomes = train_cases(RESNET, tmp_path, cache, ranks, cases)
    assert list(outcomes) == cases
    for case, outcome in outcomes.items():
        result = outcome["result"]
        has_formula = "rank_activation_formula" in result
        assert has_formula == ("recompute" not in case), case
        tolerances = dict(TOLERANCES)
        if not has_formula:
            del tolerances["activation"]
        assert list_rank_formula_gaps(result, tolerances) == [], case
