"""The formulas of gpt_parallel for memory and messages equal measurements, for each layout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness.commands.processes import run_experiment
from tests.harness.environment.randomness import draw_cases

NAME = "gpt_parallel"
SETTINGS = (
    *("data.context=48", "data.block=1", "data.test_limit=4", "width=64", "layers=2", "heads=4", "batch=16", "steps=2"),
    *("evaluate_every=0", "prompt=d", "log.progress=none", "launch.threads=1"),
)
LAYOUTS = (
    "replicas=1",
    "replicas=1 dropout=0.2 activation=gelu accumulate=2",
    "replicas=2 accumulate=2",
    "replicas=1 tensor=2 tied=false",
    "replicas=1 tensor=2 sequence=true dropout=0.2 key_value_heads=2",
    "replicas=1 fsdp=2 accumulate=2",
    "replicas=1 fsdp=2 reshard=false tied=false",
    "replicas=2 fsdp=2",
    "replicas=1 fsdp=2 tensor=2",
    "replicas=2 tensor=2 sequence=true",
    "replicas=1 context=2 accumulate=2",
    "replicas=1 context=2 tensor=2 sequence=true key_value_heads=2 dropout=0.2",
    "replicas=1 context=2 fsdp=2",
    "replicas=2 context=2",
    "replicas=1 context=4 heads=2",
)
TOLERANCES = {"parameters": 0, "gradients": 0, "optimizer": 0, "activations": 0.05, "sent": 0.01}
"""Largest relative difference of a measurement from its formula. Messages also contain a few numbers for norms."""


@pytest.mark.parametrize("layout", draw_cases("gpt-formulas", LAYOUTS, 3))
def test_memory_and_messages_equal_the_formulas(layout: str, tmp_path: Path, cache: Path) -> None:
    result = run_experiment(NAME, f"data.cache={cache}", *SETTINGS, *layout.split(), runs=tmp_path).result
    for name, tolerance in TOLERANCES.items():
        predicted = result[f"predicted_{name}_bytes"]
        assert result[f"{name}_bytes"] == pytest.approx(predicted, rel=tolerance, abs=100), name
    has_peers = re.search(r"(replicas|fsdp|context|tensor)=[24]", layout) is not None
    is_divided = "fsdp=2" in layout or "tensor=2" in layout
    assert 0 < result["training_state_share"] <= (0.55 if is_divided else 1)
    assert (result["sent_bytes"] > 1000) == has_peers
