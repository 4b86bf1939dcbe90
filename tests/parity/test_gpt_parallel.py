"""A GPT under every layout equals one process, in float64, to 1e-9: losses, norms, parameters, evaluation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.environment.randomness import draw_cases
from tests.harness.parity.driver import train_cases
from tests.harness.parity.gpt_parallel_cases import (
    DELAY_SECONDS,
    GPT_PARALLEL,
    INTERRUPTED_STEP,
    STEPS,
    list_formula_gaps,
)
from tests.harness.parity.method import run_reference
from tests.harness.parity.reference import list_differences

BASE = "replicas=1"
GROUPED = "key_value_heads=2,tied=false,activation=gelu"
BUILTIN = "launch.backend=builtin"
FEW = "steps=8"
FOUR = "layers=4,accumulate=4"
"""Four blocks for up to four stages. Of the six steps of an epoch, the last has one microbatch instead of four."""
CASES = {
    2: """
        tensor=2
        tensor=2,sequence=true,launch.backend=builtin
        tensor=2,sequence=true,key_value_heads=2,tied=false,activation=gelu
        fsdp=2,accumulate=2
        fsdp=2,reshard=false,launch.backend=builtin
        replicas=2,accumulate=2,launch.backend=builtin
        context=2,accumulate=2
        context=2,launch.backend=builtin
        replicas=2,accumulate=2,zero1=true,launch.backend=builtin
        context=2,zero1=true
        recompute=blocks,tensor=2,sequence=true,accumulate=2
        recompute=selective,tensor=2,key_value_heads=2,tied=false,activation=gelu
        recompute=selective,fsdp=2,accumulate=2,launch.backend=builtin
        recompute=blocks,replicas=2,accumulate=2
        recompute=selective,replicas=2,zero1=true
        recompute=blocks,context=2,accumulate=2,launch.backend=builtin
    """,
    3: """
        fsdp=3,batch=9
        fsdp=3,batch=9,reshard=false,launch.backend=builtin
        fsdp=3,batch=9,key_value_heads=2,tied=false,activation=gelu
        replicas=3,batch=9,zero1=true
    """,
    4: """
        tensor=4,sequence=true
        tensor=4,launch.backend=builtin
        fsdp=4
        replicas=4
        tensor=2,fsdp=2,sequence=true,launch.backend=builtin
        tensor=2,fsdp=2,accumulate=2
        tensor=2,fsdp=2,key_value_heads=2,tied=false,activation=gelu
        tensor=2,replicas=2,sequence=true
        tensor=2,replicas=2,launch.backend=builtin
        fsdp=2,replicas=2,launch.backend=builtin
        fsdp=2,replicas=2,reshard=false
        context=4
        context=2,tensor=2
        context=2,tensor=2,sequence=true,key_value_heads=2,tied=false,activation=gelu
        context=2,fsdp=2,reshard=false
        context=2,fsdp=2,launch.backend=builtin
        context=2,replicas=2,launch.backend=builtin
        replicas=4,zero1=true,key_value_heads=2,tied=false,activation=gelu
        tensor=2,replicas=2,zero1=true,sequence=true
        context=2,tensor=2,zero1=true,accumulate=2
        context=2,replicas=2,zero1=true,launch.backend=builtin
        fsdp=2,replicas=2,zero1=true,launch.backend=builtin
        fsdp=2,replicas=2,zero1=true,reshard=false
        recompute=selective,context=2,tensor=2,sequence=true,key_value_heads=2,tied=false,activation=gelu
        recompute=blocks,context=2,fsdp=2,launch.backend=builtin
        recompute=selective,fsdp=2,replicas=2,reshard=false
    """,
    8: """
        tensor=2,fsdp=2,replicas=2,sequence=true
        context=2,tensor=2,fsdp=2,sequence=true
        context=2,fsdp=2,replicas=2
        context=2,tensor=2,replicas=2,zero1=true
        context=2,fsdp=2,replicas=2,zero1=true
        recompute=blocks,context=2,tensor=2,fsdp=2
    """,
}
"""Cases by number of ranks, one in each line. 3 ranks divide no dimension but `hidden` evenly."""
STAGE_CASES = {
    2: """
        stages=2
        stages=2,schedule=gpipe,launch.backend=builtin
        stages=2,schedule=naive,tied=false
        stages=2,schedule=zero_bubble,launch.backend=builtin
        stages=4,stages_per_process=2,schedule=interleaved_1f1b,tied=false
        stages=4,stages_per_process=2,schedule=zbv
        stages=4,stages_per_process=2,schedule=zbv,tied=false,launch.backend=builtin
        over_network,stages=4,stages_per_process=2,schedule=dualpipev
        recompute=blocks,stages=2,schedule=gpipe
        recompute=selective,stages=2,schedule=naive,tied=false
        recompute=blocks,stages=4,stages_per_process=2,schedule=interleaved_1f1b
        stages=2,schedule=tests/harness/custom_code/schedules.py:last_first
        stages=4,stages_per_process=2,schedule=tests/harness/custom_code/schedules.py:last_first
    """,
    3: """
        stages=3
        over_network,stages=3,schedule=zero_bubble
    """,
    4: """
        stages=4,launch.backend=builtin
        stages=4,schedule=zero_bubble
        stages=2,tensor=2,launch.backend=builtin
        stages=2,tensor=2,sequence=true,schedule=zero_bubble
        stages=4,stages_per_process=2,tensor=2,sequence=true,schedule=zbv,launch.backend=builtin
        stages=2,context=2,schedule=gpipe
        stages=4,stages_per_process=2,context=2,schedule=dualpipev,tied=false,launch.backend=builtin
        stages=2,replicas=2,launch.backend=builtin
        stages=2,replicas=2,schedule=naive
        stages=4,stages_per_process=2,replicas=2,schedule=zbv
        stages=2,replicas=2,zero1=true
        recompute=blocks,stages=2,tensor=2
        recompute=selective,stages=2,fsdp=2
        stages=2,context=2,zero1=true,schedule=zero_bubble
        stages=2,fsdp=2,launch.backend=builtin
        over_network,stages=2,fsdp=2,reshard=false
        stages=4,stages_per_process=2,fsdp=2,schedule=interleaved_1f1b
        stages=2,fsdp=2,schedule=gpipe,tied=false
        stages=2,fsdp=2,schedule=naive
        recompute=selective,stages=2,fsdp=2,schedule=gpipe,reshard=false
        recompute=blocks,stages=2,replicas=2,zero1=true,schedule=gpipe
        stages=2,replicas=2,schedule=zero_bubble
        stages=4,stages_per_process=2,replicas=2,schedule=dualpipev
        stages=4,stages_per_process=2,replicas=2,schedule=interleaved_1f1b
        stages=4,stages_per_process=2,tensor=2,schedule=interleaved_1f1b
        stages=4,stages_per_process=2,tensor=2,sequence=true,schedule=interleaved_1f1b,launch.backend=builtin
        stages=4,stages_per_process=2,context=2,schedule=interleaved_1f1b
    """,
    8: """
        stages=2,tensor=2,fsdp=2,sequence=true
        stages=2,context=2,replicas=2,launch.backend=builtin
        stages=2,replicas=2,fsdp=2,batch=16
        stages=2,context=2,fsdp=2
        stages=4,stages_per_process=2,context=2,tensor=2,sequence=true,schedule=zbv
    """,
}
"""Cases of four blocks and four microbatches, one in each line."""
DRAWN_CASES = {2: 2, 3: 1, 4: 2, 8: 1}
DRAWN_STAGE_CASES = {2: 1, 3: 1, 4: 1, 8: 1}
"""Number of cases that a test run draws for each number of ranks."""
SAVED = f"checkpoint.every_steps={INTERRUPTED_STEP},{FEW}"
UNINTERRUPTED = f"tensor=2,fsdp=2,{SAVED}"
RESUMED_FROM_FSDP = f"resumed_from_fsdp,{UNINTERRUPTED}"
UNINTERRUPTED_CONTEXT = f"context=2,{SAVED}"
RESUMED_FROM_CONTEXT = f"resumed_from_context,tensor=2,{SAVED}"
UNINTERRUPTED_STAGES = f"stages=2,{FOUR},{SAVED}"
RESUMED_FROM_STAGES = f"resumed_from_stages,tensor=2,{FOUR},{SAVED}"
STAGES_FROM_FSDP = f"resumed_from_fsdp,{UNINTERRUPTED_STAGES}"
UNINTERRUPTED_ZERO1 = f"replicas=2,zero1=true,{SAVED}"
RECOMPUTED_CONTEXT = f"recompute=selective,{UNINTERRUPTED_CONTEXT}"
RESUMED_FROM_SELECTIVE = f"resumed_from_selective,recompute=blocks,{UNINTERRUPTED}"
EQUAL_CASES = {
    f"resumed,{case}": case
    for case in (UNINTERRUPTED, UNINTERRUPTED_CONTEXT, UNINTERRUPTED_STAGES, UNINTERRUPTED_ZERO1)
}
EQUAL_CASES[f"resumed_from_zero1,replicas=2,{SAVED}"] = UNINTERRUPTED_ZERO1
EQUAL_CASES[RECOMPUTED_CONTEXT] = UNINTERRUPTED_CONTEXT
EQUAL_CASES[RESUMED_FROM_SELECTIVE] = UNINTERRUPTED
"""Cases that must equal another case to the bit."""
RESUMED_FROM_ZERO1 = f"resumed_from_zero1,tensor=2,fsdp=2,{SAVED}"
RESUMED_WITH_ZERO1 = f"resumed_from_fsdp,replicas=2,zero1=true,{SAVED}"
OTHER_DIMS = f"other_dims,tensor=2,fsdp=2,{BUILTIN},{FEW}"
SLOW_RANK = "slow_rank,replicas=2"
FIXED_CASES = {
    2: (
        *(SLOW_RANK, UNINTERRUPTED_CONTEXT, f"resumed,{UNINTERRUPTED_CONTEXT}", RESUMED_FROM_CONTEXT),
        *(UNINTERRUPTED_STAGES, f"resumed,{UNINTERRUPTED_STAGES}", RESUMED_FROM_STAGES, STAGES_FROM_FSDP),
        *(UNINTERRUPTED_ZERO1, f"resumed,{UNINTERRUPTED_ZERO1}", f"resumed_from_zero1,replicas=2,{SAVED}"),
        *(RESUMED_WITH_ZERO1, RECOMPUTED_CONTEXT),
    ),
    4: (
        UNINTERRUPTED,
        f"resumed,{UNINTERRUPTED}",
        RESUMED_FROM_FSDP,
        RESUMED_FROM_SELECTIVE,
        OTHER_DIMS,
        RESUMED_FROM_ZERO1,
    ),
}
"""Cases of each test run, in addition to the drawn ones."""


def get_reference_case(case: str) -> str:
    """Return the case of one process that trains the same model."""
    shared_settings = [
        settings for settings in (GROUPED, "batch=9", "batch=16", "tied=false", FOUR, FEW) if settings in case
    ]
    return ",".join([BASE, *shared_settings])


def is_untimed(case: str) -> bool:
    """Return whether ranks wait for each other in the forward pass, so that runs measure no times."""
    return any(setting in case for setting in ("tensor=", "context=", "stages="))


@pytest.mark.parametrize("ranks", draw_cases("gpt-ranks", list(CASES), 2))
def test_layouts_equal_one_process(ranks: int, tmp_path: Path, cache: Path) -> None:
    cases = []
    for case in draw_cases(f"gpt-layouts-{ranks}", CASES[ranks].split(), DRAWN_CASES[ranks]):
        cases.append(f"{case},{FEW}" if is_untimed(case) else case)
    for case in draw_cases(f"gpt-stages-{ranks}", STAGE_CASES[ranks].split(), DRAWN_STAGE_CASES[ranks]):
        cases.append(f"{case},{FOUR},{FEW}")
    cases += FIXED_CASES.get(ranks, ())
    outcomes = train_cases(GPT_PARALLEL, tmp_path, cache, ranks, cases)
    assert list(outcomes) == cases
    for case, outcome in outcomes.items():
        single_process = run_reference(GPT_PARALLEL, cache, get_reference_case(case))
        assert list_differences(outcome, single_process) == [], case
        losses = single_process["losses"]
        assert len(outcome["norms"]) == len(losses) == (8 if FEW in case else STEPS)
        assert max(single_process["norms"]) > 1, "the comparison requires gradients that are clipped"
        assert losses[-1] < 0.9 * losses[0], "the comparison requires a model that learns"

        differing = [gap.partition(":")[0] for gap in list_formula_gaps(outcome["result"])]
        if case.startswith("resumed") and FOUR in case:
            # The measured step is the first after the resume, which has one microbatch.
            assert differing, case
            assert not {"parameters", "gradients", "optimizer"} & set(differing), case
        else:
            # fully_shard copies gathered parameters in another way if it divides another dimension than 0.
            assert differing == (["peak_parameters"] if case == OTHER_DIMS else []), case

        times = [first_step["before_backward"] for first_step in outcome["first_steps"]]
        assert [time is None for time in times] == [is_untimed(case) or FEW in case] * ranks, case
        if case == SLOW_RANK:
            assert times[1] - times[0] > DELAY_SECONDS / 2, "the time of a fast rank must not contain waiting"
        if case in EQUAL_CASES:
            expected = outcomes[EQUAL_CASES[case]]
            assert outcome["losses"] == expected["losses"]
            assert outcome["norms"] == expected["norms"]
            for name, tensor in expected["state"].items():
                assert torch.equal(outcome["state"][name], tensor), name


def find_distance(outcome: dict[str, Any], single_process: dict[str, Any]) -> float:
    """Return the Euclidean distance of all parameters from those of one process."""
    gaps = [outcome["state"][name] - tensor for name, tensor in single_process["state"].items()]
    return math.sqrt(sum(gap.square().sum().item() for gap in gaps))


@pytest.mark.drawn
def test_layouts_in_bf16_are_as_near_to_float64_as_one_process(tmp_path: Path, cache: Path) -> None:
    bf16 = "precision=bf16,dtype=float32"
    sequence = "tensor=2,sequence=true"
    recomputed = f"recompute=selective,{sequence}"
    layouts = [
        *("tensor=2", sequence, recomputed, "context=2", "fsdp=2", "replicas=2,zero1=true"),
        "stages=2,accumulate=2",
    ]
    outcomes = train_cases(GPT_PARALLEL, tmp_path, cache, 2, [f"{layout},{bf16}" for layout in layouts])
    single_case = f"{BASE},{bf16}"
    outcome_of_one = train_cases(GPT_PARALLEL, tmp_path, cache, 1, [single_case])[single_case]
    single_process = run_reference(GPT_PARALLEL, cache, BASE)
    distance_of_one = find_distance(outcome_of_one, single_process)
    assert distance_of_one > 1e-3, "bf16 rounds"
    for case, outcome in outcomes.items():
        assert find_distance(outcome, single_process) <= 2 * distance_of_one, case
        assert outcome["differing_ranks"] == [], case
    assert find_distance(outcomes[f"{recomputed},{bf16}"], outcomes[f"{sequence},{bf16}"]) == 0
