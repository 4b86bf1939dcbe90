"""Train elastic runs with faults, and compare them with undisturbed runs on one rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from common.runs.folder import RunFolder
from common.techniques.elastic.coordinator import EndReason
from common.techniques.elastic.member import STUCK_REASON
from tests.harness.commands import execution
from tests.harness.commands.processes import FinishedRun, make_environment
from tests.harness.environment.shared_results import run_experiment_once
from tests.harness.experiments.registry import ENTRY_BY_NAME
from tests.harness.runs.resuming import resume_run

MAX_TRIES = 3
SMALL_RUN_SETTINGS = (
    *("data.name=digits", "data.train_limit=240", "data.test_limit=50", "batch=24", "steps=25", "epochs=3"),
    *("dtype=float64", "model=mlp", "launch.threads=1", "launch.device=cpu", "log.progress=none"),
    *("checkpoint.every_steps=4", "checkpoint.every_seconds=0", "optim.lr=0.1"),
)


def train_with_faults(
    faults: str, *settings: str, runs: Path, name: str = "ddp_multinode", status: int | None = 0
) -> FinishedRun:
    """Train with `faults` as described in tests/harness/elastic/faults.py, and check the exit status, if not None."""
    script = [sys.executable, "-m", "tests.harness.elastic.faults", name, faults]
    command = [*script, f"runs={runs}", *SMALL_RUN_SETTINGS, *settings]
    process = execution.execute_command(command, env=make_environment(), timeout=120, status=status)
    return FinishedRun(process.returncode, process.stdout, process.stderr, runs)


def train_on_one_rank(factory: pytest.TempPathFactory, *settings: str, name: str = "ddp_multinode") -> RunFolder:
    """Return an undisturbed run on one rank. It is trained once and shared by all tests."""
    settings_without_paths = [setting for setting in settings if "/" not in setting]
    key = "-".join(["one-rank", name, *settings_without_paths])
    all_settings = (*SMALL_RUN_SETTINGS, *settings, "processes_per_node=1")
    return run_experiment_once(factory, key, name, *all_settings).folder


def train_and_compare(
    undisturbed: RunFolder, faults: str, *settings: str, runs: Path, name: str = "ddp_multinode"
) -> RunFolder:
    """Train with `faults`; check that the run finishes with the losses and scores of `undisturbed`.

    A rank that is stuck in gloo is lost, too. If no other rank has its part of the state, the run ends and is resumed.
    The losses of such a run are checked. Then another run is trained, because it has not lost the ranks of `faults`.
    """
    for number in range(MAX_TRIES):
        process = train_with_faults(faults, *settings, runs=runs / str(number), name=name, status=None)
        log_files = process.folder.path.glob("attempts/*/logs/rank-*.log")
        logs = [file.read_text() for file in log_files]
        is_stuck = ":block" not in faults and any(STUCK_REASON in log for log in logs)
        if is_stuck and EndReason.SHARD_LOST.value in process.stderr:
            resumed = resume_run(ENTRY_BY_NAME[name], process.folder, status=None)
            assert resumed.returncode == 0, (faults, resumed.stderr, logs)
        else:
            assert process.returncode == 0, (faults, process.stderr, logs)
        problems = find_metric_differences(process.folder, undisturbed)
        assert not problems, (faults, problems)
        if not is_stuck:
            print(f"{faults}: {number + 1} of at most {MAX_TRIES} runs")
            return process.folder
    raise AssertionError(f"{faults}: a rank was stuck in gloo in each of {MAX_TRIES} runs: {logs}")


def list_row_keys(rows: list[dict[str, Any]]) -> list[tuple[int, bool]]:
    """Return the step of each row, and whether the row is an evaluation."""
    return [(row["global_step"], "test_loss" in row) for row in rows]


def find_metric_differences(run: RunFolder, undisturbed: RunFolder) -> list[str]:
    """Return the differences between the metrics of two runs, except for rounding."""
    rows = run.read_metrics()
    expected_rows = undisturbed.read_metrics()
    keys = list_row_keys(rows)
    expected_keys = list_row_keys(expected_rows)
    if keys != expected_keys:
        missing = sorted(set(expected_keys) - set(keys))
        unexpected = sorted(set(keys) - set(expected_keys))
        return [f"missing rows: {missing}; unexpected rows: {unexpected}; or the order differs"]

    problems = []
    for row, expected in zip(rows, expected_rows, strict=True):
        for name in ("loss", "test_loss", "test_accuracy", "samples", "skipped"):
            difference = row.get(name, 0.0) - expected.get(name, 0.0)
            if abs(difference) > 1e-9:
                problems.append(f"step {row['global_step']}: {name} {row.get(name)}, expected {expected.get(name)}")
    return problems


def list_world_changes(folder: RunFolder) -> list[tuple[list[int], list[int]]]:
    """Return the lost ranks and the joined ranks of each change of the world."""
    generations = folder.result["measured"]["generations"]
    return [(change["lost"], change["joined"]) for change in generations]


def list_lost_and_joined(folder: RunFolder) -> tuple[list[int], list[int]]:
    """Return all lost ranks and all joined ranks, in order."""
    all_lost = []
    all_joined = []
    for lost, joined in list_world_changes(folder):
        all_lost += lost
        all_joined += joined
    return all_lost, all_joined
