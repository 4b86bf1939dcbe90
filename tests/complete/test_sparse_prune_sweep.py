"""A sweep of sparse_prune: masks depend on the criterion and the seed, not on the number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.runs.folder import RunFolder
from configs.sparse_prune import CRITERIA
from tests.harness.commands.processes import FinishedRun, Settings, read_result_values, run_experiment

QUIET = (
    "model=mlp",
    "batch=16",
    "data.test_limit=100",
    "optim.warmup=0",
    "launch.threads=1",
    "export=false",
    "int8=false",
)
TOTAL = 784 * 128 + 128 * 64 + 64 * 10  # weights of the mlp


Results = dict[tuple[int, str], dict[str, Any]]


def sweep(runs: Path, *arguments: str) -> tuple[FinishedRun, Results]:
    """Sweep over the criteria: prune at once and take one step. Returns the results by seed and criterion."""
    oneshot = ("schedule=oneshot", "begin=0", "end=0", "steps=1", "dtype=float64")
    settings = ("sweep=true", "levels=[0.9]", *arguments, *QUIET, *oneshot)
    completed = run_experiment("sparse_prune", *settings, runs=runs, timeout=240)
    (folder,) = (runs / "sweeps").iterdir()
    assert (folder / "sparsity.png").read_bytes().startswith(b"\x89PNG")
    outcomes: Results = {}
    for cell in json.loads((folder / "sweep.json").read_text())["cells"]:
        assert cell["state"] == "finished", cell
        point = cell["values"]["seed"], cell["values"].get("criterion", "dense")
        outcomes[point] = read_result_values(RunFolder(runs / cell["run"]))
    return completed, outcomes


@pytest.mark.drawn
def test_masks_of_a_sweep_depend_on_criterion_and_seed_but_not_on_ranks(digits: Settings, tmp_path: Path) -> None:
    completed, one_rank = sweep(tmp_path / "one", *digits, "repeats=1")
    _, two_ranks = sweep(tmp_path / "two", *digits, "repeats=2", "processes_per_node=2", "criteria=[taylor]")
    assert list(one_rank) == [(0, name) for name in ("dense", *CRITERIA)]
    assert list(two_ranks) == [(0, "dense"), (0, "taylor"), (1, "dense"), (1, "taylor")]

    masks = {point: outcome["masks"] for point, outcome in (two_ranks | one_rank).items()}
    del masks[1, "dense"]
    assert len(masks) == 4 + 1 + 1
    assert len(set(masks.values())) == len(masks), "each criterion and seed has its own masks"
    for name in ("dense", "taylor"):
        assert two_ranks[0, name]["masks"] == masks[0, name], "masks do not depend on the number of ranks"
    for (_, name), outcome in one_rank.items():
        if name != "dense":
            assert outcome["nonzero"] == TOTAL - round(0.9 * TOTAL)
    for text in ("magnitude 90 %", "below dense", "non-zero", "dense bf16"):
        assert text in completed.stdout
