"""Elastic runs of the tests, and the undisturbed run of one process that each must equal."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from common.runs.folder import RunFolder
from common.techniques.elastic.coordinator import EndReason
from common.techniques.elastic.member import STUCK_REASON
from tests.harness import warm
from tests.harness.processes import Done, environment
from tests.harness.registry import BY_NAME
from tests.harness.resuming import resume
from tests.harness.shared import run_once

TRIES = 3
SMALL = (
    *("data.name=digits", "data.train_limit=240", "data.test_limit=50", "batch=24", "steps=25", "epochs=3"),
    *("dtype=float64", "model=mlp", "launch.threads=1", "launch.device=cpu", "log.progress=none"),
    *("checkpoint.every_steps=4", "checkpoint.every_seconds=0", "optim.lr=0.1"),
)


def train(faults: str, *settings: str, runs: Path, name: str = "ddp_multinode") -> Done:
    """A run with `faults`, as tests/harness/elastic.py takes them."""
    line = [sys.executable, "-m", "tests.harness.elastic", name, faults, f"runs={runs}", *SMALL, *settings]
    done = warm.execute(line, env=environment(), timeout=120)
    return Done(done.returncode, done.stdout, done.stderr, runs)


def train_alone(factory: pytest.TempPathFactory, *settings: str, name: str = "ddp_multinode") -> RunFolder:
    """The run of one process that nothing disturbs."""
    key = "-".join(["alone", name, *(word for word in settings if "/" not in word)])
    return run_once(factory, key, name, *SMALL, *settings, "processes_per_node=1").folder


def train_like(alone: RunFolder, faults: str, *settings: str, runs: Path, name: str = "ddp_multinode") -> RunFolder:
    """A run with `faults` that ends well and with the numbers of `alone`.

    Where gloo could not be woken, one more rank is lost, and if that alone had a part of the state the run is resumed.
    That has the numbers, too; as its losses are others, another run is made.
    """
    for number in range(TRIES):
        done = train(faults, *settings, runs=runs / str(number), name=name)
        logs = [file.read_text() for file in done.folder.path.glob("attempts/*/logs/rank-*.log")]
        stuck = ":block" not in faults and any(STUCK_REASON in log for log in logs)
        if stuck and EndReason.SHARD_LOST.value in done.err:
            resumed = resume(BY_NAME[name], done.folder)
            assert resumed.returncode == 0, (faults, resumed.stderr, logs)
        else:
            assert done.status == 0, (faults, done.err, logs)
        wrong = differences(done.folder, alone)
        assert not wrong, (faults, wrong)
        if not stuck:
            return done.folder
    raise AssertionError(f"{faults}: gloo could not be woken in {TRIES} runs, one after another: {logs}")


def differences(found: RunFolder, alone: RunFolder) -> list[str]:
    """Where the rows of two runs differ: other steps or evaluations, or numbers that rounding does not explain."""
    rows, expected = found.read_metrics(), alone.read_metrics()
    keys = [[(row["global_step"], "test_loss" in row) for row in given] for given in (rows, expected)]
    if keys[0] != keys[1]:
        less, more = (sorted({*one} - {*other}) for one, other in ((keys[1], keys[0]), keys))
        return [f"rows {less} are missing, {more} should not be there, or the order is another one"]
    return [
        f"step {row['global_step']}: {name} {row[name]}, expected {other[name]}"
        for row, other in zip(rows, expected, strict=True)
        for name in ("loss", "test_loss", "test_accuracy", "samples", "skipped")
        if abs(row.get(name, 0.0) - other.get(name, 0.0)) > 1e-9
    ]


def list_changes(folder: RunFolder) -> list[tuple[list[int], list[int]]]:
    """Of each change of the ranks, which were lost and which joined."""
    return [(change["lost"], change["joined"]) for change in folder.result["measured"]["generations"]]


def list_lost_and_joined(folder: RunFolder) -> tuple[list[int], list[int]]:
    """All ranks that were lost, and all that joined, one after another."""
    lost, joined = zip(*list_changes(folder), strict=True)
    return [*itertools.chain(*lost)], [*itertools.chain(*joined)]
