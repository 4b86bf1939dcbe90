"""A GPT under every layout equals one process, in float64, to 1e-9: losses, norms, parameters, evaluation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.harness.environment.randomness import draw_cases
from tests.harness.parity.driver import train_cases
from tests.harness.parity.gpt_parallel_cases import GPT_PARALLEL, STEPS
from tests.harness.parity.method import run_reference
from tests.harness.parity.reference import list_differences

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
        "context=2,accumulate=2",
        f"context=2,{BUILTIN}",
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
        "context=4",
        "context=2,tensor=2",
        f"context=2,tensor=2,sequence=true,{GROUPED}",
        "context=2,fsdp=2,reshard=false",
        f"context=2,fsdp=2,{BUILTIN}",
        f"context=2,replicas=2,{BUILTIN}",
    ),
    8: (
        "tensor=2,fsdp=2,replicas=2,sequence=true",
        "context=2,tensor=2,fsdp=2,sequence=true",
        "context=2,fsdp=2,replicas=2",
    ),
}
DRAWN_CASES = {2: 3, 4: 4, 8: 1}
"""Number of cases that a test run draws for each number of ranks."""


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


def find_distance(outcome: dict[str, Any], single_process: dict[str, Any]) -> float:
    """Return the Euclidean distance of all parameters from those of one process."""
    gaps = [outcome["state"][name] - tensor for name, tensor in single_process["state"].items()]
    return math.sqrt(sum(gap.square().sum().item() for gap in gaps))


def test_layouts_in_bf16_are_as_near_to_float64_as_one_process(tmp_path: Path, cache: Path) -> None:
    bf16 = "precision=bf16,dtype=float32"
    layouts = ["tensor=2", "tensor=2,sequence=true", "context=2", "fsdp=2", "replicas=2"]
    outcomes = train_cases(GPT_PARALLEL, tmp_path, cache, 2, [f"{layout},{bf16}" for layout in layouts])
    single_case = f"{BASE},{bf16}"
    outcome_of_one = train_cases(GPT_PARALLEL, tmp_path, cache, 1, [single_case])[single_case]
    single_process = run_reference(GPT_PARALLEL, cache, BASE)
    distance_of_one = find_distance(outcome_of_one, single_process)
    assert distance_of_one > 1e-3, "bf16 rounds"
    for case, outcome in outcomes.items():
        assert find_distance(outcome, single_process) <= 2 * distance_of_one, case
        assert outcome["differing_ranks"] == [], case
