"""A GPT under every layout equals one process, in float64, to 1e-9: losses, norms, parameters, evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.environment.randomness import draw_cases
from tests.harness.parity.driver import train_cases
from tests.harness.parity.gpt_parallel_cases import GPT_PARALLEL, STEPS
from tests.harness.parity.method import run_reference
from tests.harness.parity.reference import list_differences, list_loss_differences

BASE = "replicas=1"
GROUPED = "key_value_heads=2,tied=false,activation=gelu"
BUILTIN = "launch.backend=builtin"
CASES = {
    2: (
        "tensor=2",
        f"tensor=2,sequence=true,{BUILTIN}",
        f"tensor=2,sequence=true,{GROUPED}",
        "fsdp=2,accumulate=2",
        f"fsdp=2,reshard=false,{BUILTIN}",
        f"replicas=2,accumulate=2,{BUILTIN}",
    ),
    4: (
        "tensor=4,sequence=true",
        f"tensor=4,{BUILTIN}",
        "fsdp=4",
        "replicas=4",
        f"tensor=2,fsdp=2,sequence=true,{BUILTIN}",
        "tensor=2,fsdp=2,accumulate=2",
        f"tensor=2,fsdp=2,{GROUPED}",
        "tensor=2,replicas=2,sequence=true",
        f"tensor=2,replicas=2,{BUILTIN}",
        f"fsdp=2,replicas=2,{BUILTIN}",
        "fsdp=2,replicas=2,reshard=false",
    ),
    8: ("tensor=2,fsdp=2,replicas=2,sequence=true",),
}
DRAWN_CASES = {2: 4, 4: 4, 8: 1}
"""Number of cases that a test run draws for each number of ranks."""
MISTAKES = {
    2: (
        "redraws_shards,tensor=2",
        "different_masks,tensor=2",
        "forgets_token_shards,tensor=2,sequence=true",
        "partial_scales,tensor=2,sequence=true",
        "unties_head,tensor=2",
        "counts_table_twice,tensor=2",
        "equal_masks,replicas=2",
        "averages_per_rank,replicas=2",
        "local_norm,tensor=2",
        "counts_copies,tensor=2",
    ),
    4: ("ignores_tensor_shards,tensor=2,fsdp=2",),
}


def get_reference_case(case: str) -> str:
    """Return the case of one process that trains the same model."""
    return f"{BASE},{GROUPED}" if GROUPED in case else BASE


@pytest.mark.parametrize("ranks", CASES)
def test_layouts_equal_one_process(ranks: int, tmp_path: Path, cache: Path) -> None:
    cases = draw_cases(f"gpt-layouts-{ranks}", CASES[ranks], DRAWN_CASES[ranks])
    outcomes = train_cases(GPT_PARALLEL, tmp_path, cache, ranks, cases)
    assert list(outcomes) == cases
    for case, outcome in outcomes.items():
        single_process = run_reference(GPT_PARALLEL, cache, get_reference_case(case))
        assert list_differences(outcome, single_process) == [], case
        losses = single_process["losses"]
        assert len(outcome["norms"]) == len(losses) == STEPS
        assert max(single_process["norms"]) > 1, "the comparison requires gradients that are clipped"
        assert losses[-1] < 0.9 * losses[0], "the comparison requires a model that learns"


@pytest.mark.parametrize("ranks", MISTAKES)
def test_the_check_sees_mistakes_of_layouts(ranks: int, tmp_path: Path, cache: Path) -> None:
    cases = draw_cases(f"gpt-mistakes-{ranks}", MISTAKES[ranks], 4)
    outcomes = train_cases(GPT_PARALLEL, tmp_path, cache, ranks, cases)
    single_process = run_reference(GPT_PARALLEL, cache, BASE)
    for case, outcome in outcomes.items():
        assert list_loss_differences(outcome, single_process), case
