"""The formulas of gpt_parallel for memory and messages equal measurements, for each measured layout and other models.

Combinations of layouts are compared in test_gpt_parallel.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import gpt_parallel as benchmark
from tests.harness.environment.randomness import draw_cases
from tests.harness.parity.driver import train_cases
from tests.harness.parity.gpt_parallel_cases import GPT_PARALLEL, list_formula_gaps
from tests.harness.parity.rank_formulas import list_rank_formula_gaps

SETTINGS = "data.context=48,width=64,batch=24,steps=1,epochs=1,evaluate_every=0,dropout=0,optim.warmup=0"
MEASURED_LAYOUTS = [",".join((*layout, "tied=false")) for layout in benchmark.LAYOUTS.values()]
"""Layouts of one or two ranks whose formulas the page compares with measurements."""
CASES = {
    1: """
        dropout=0.2,activation=gelu,accumulate=3
        data.train_limit=400,data.block=50,batch=4,width=32,layers=1,hidden=32
        recompute=blocks,layers=4
        recompute=selective,key_value_heads=2,accumulate=3
        recompute=selective,dropout=0.2,activation=gelu,data.context=24,layers=1
    """,
    2: """
        tensor=2,sequence=true,dropout=0.2,key_value_heads=2
        tensor=2,data.context=16,batch=8
        fsdp=2,accumulate=3,key_value_heads=2
        fsdp=2,reshard=false
        fsdp=2,reshard=false,accumulate=3,tied=false,layers=1
        replicas=2,accumulate=3
        context=2,key_value_heads=2,dropout=0.2
        context=2,accumulate=2
        stages=2,accumulate=3,layers=3,tied=false,dropout=0.2
        stages=4,stages_per_process=2,schedule=zbv,accumulate=4,layers=4,key_value_heads=2
        replicas=2,zero1=true,accumulate=3
        context=2,zero1=true,layers=1,tied=false
        recompute=blocks,tensor=2,accumulate=3
        recompute=blocks,tensor=2,sequence=true,dropout=0.2,layers=3
        recompute=selective,tensor=2,sequence=true,key_value_heads=2
        recompute=selective,tensor=2,dropout=0.2,tied=false
        recompute=blocks,context=2,dropout=0.2,layers=4
        recompute=selective,context=2,key_value_heads=2
        recompute=blocks,fsdp=2,layers=4
        recompute=selective,fsdp=2,reshard=false
        recompute=blocks,stages=2,accumulate=3,layers=4,dropout=0.2
        recompute=selective,stages=4,stages_per_process=2,schedule=interleaved_1f1b,accumulate=4,layers=4
    """,
    3: """
        fsdp=3
        fsdp=3,reshard=false,accumulate=2,tied=false
        fsdp=3,layers=1,width=32
        replicas=3,zero1=true
    """,
    4: """
        stages=2,fsdp=2,accumulate=3,layers=3
        stages=2,fsdp=2
        stages=4,stages_per_process=2,schedule=interleaved_1f1b,fsdp=2,accumulate=4,layers=4,reshard=false
    """,
}
"""Cases of other models by number of ranks, one in each line."""


@pytest.mark.parametrize("ranks", draw_cases("formulas-ranks", list(CASES), 1))
def test_memory_and_messages_equal_the_formulas(ranks: int, tmp_path: Path, cache: Path) -> None:
    measured_layouts = [layout for layout in MEASURED_LAYOUTS if ("=2" in layout) == (ranks == 2)] if ranks < 3 else []
    cases = [f"{SETTINGS},{case}" for case in (*measured_layouts, *CASES[ranks].split())]
    outcomes = train_cases(GPT_PARALLEL, tmp_path, cache, ranks, cases)
    assert list(outcomes) == cases
    for case, outcome in outcomes.items():
        result = outcome["result"]
        assert list_formula_gaps(result) == [], case
        assert list_rank_formula_gaps(result) == [], case
        is_divided = "fsdp=" in case or "tensor=" in case
        assert 0 < result["training_state_share"] <= (0.55 if is_divided else 1), case
        assert (result["sent_bytes"] > 1000) == (ranks > 1), case
        assert ("peak_activations_bytes" in result) == ("recompute=" in case), case
        for name in ("parameters", "gradients"):
            assert (result[f"peak_{name}_bytes"] > result[f"{name}_bytes"]) == ("fsdp=" in case), case
