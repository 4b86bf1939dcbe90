"""A sweep of sparse_prune: criteria differ, processes do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.runs.folder import RunFolder
from configs.sparse_prune import CRITERIA
from tests.harness.processes import Done, run, values_of

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


def sweep(runs: Path, *arguments: str) -> tuple[Done, dict[tuple[int, str], dict[str, Any]]]:
    """A sweep over the criteria that prunes at once and takes one step; the results, by seed and criterion."""
    once = ("schedule=oneshot", "begin=0", "end=0", "steps=1", "dtype=float64")
    completed = run(
        "sparse_prune", "sweep=true", "levels=[0.9]", *arguments, *QUIET, "int8=false", *once, runs=runs, timeout=240
    )
    assert completed.status == 0, completed.err + completed.out
    (folder,) = (runs / "sweeps").iterdir()
    assert (folder / "sparsity.png").read_bytes().startswith(b"\x89PNG")
    found = {}
    for cell in json.loads((folder / "sweep.json").read_text())["cells"]:
        assert cell["state"] == "finished", cell
        found[cell["values"]["seed"], cell["values"].get("criterion", "dense")] = values_of(
            RunFolder(runs / cell["run"])
        )
    return completed, found


def test_a_sweep_draws_criteria_that_choose_differently_and_processes_choose_alike(
    digits: tuple[str, ...], tmp_path: Path
) -> None:
    completed, one = sweep(tmp_path / "one", *digits, "repeats=1")
    _, two = sweep(tmp_path / "two", *digits, "repeats=2", "processes_per_node=2", "criteria=[taylor]")
    assert list(one) == [(0, name) for name in ("dense", *CRITERIA)]
    assert list(two) == [(seed, name) for seed in (0, 1) for name in ("dense", "taylor")]
    masks = {case: result["masks"] for case, result in (two | one).items() if case != (1, "dense")}
    assert len(set(masks.values())) == len(masks) == 4 + 1 + 1, "each criterion and seed has its own masks"
    assert all(two[0, name]["masks"] == masks[0, name] for name in ("dense", "taylor")), "with any number of processes"
    assert all(result["nonzero"] == TOTAL - round(0.9 * TOTAL) for (_, name), result in one.items() if name != "dense")
    assert all(arguments in completed.out for arguments in ("magnitude 90 %", "below dense", "non-zero", "dense bf16"))
