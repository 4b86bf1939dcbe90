"""Interrupt and resume runs, and compare them with uninterrupted runs."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from common.checkpoint import storage
from common.runs.folder import RunFolder
from common.system.exit_status import EXIT_RESUMABLE
from tests.harness.commands import execution
from tests.harness.commands.processes import WAIT_TIMEOUT, FinishedRun, get_only_run, make_environment, wait_until
from tests.harness.environment.randomness import create_random
from tests.harness.environment.shared_results import run_experiment_once
from tests.harness.experiments.registry import Entry
from tests.harness.repository import ROOT
from tests.harness.runs.long_runs import start_long_run

TOTAL_STEPS = 30  # of a run with the settings of the fixture `quick`, which saves after every third step
ONE_THREAD = "launch.threads=1"  # waiting threads are busy and would slow down other tests
COMPARED_COLUMNS = ("global_step", "samples", "loss", "test_loss", "test_accuracy", "test_samples")


def train_uninterrupted(
    factory: pytest.TempPathFactory, quick: tuple[str, ...], entry: Entry, ranks: int
) -> FinishedRun:
    """Return an uninterrupted run on `ranks` ranks. All tests share it, and none of them may change its folder."""
    key = f"uninterrupted-{entry.name}-{ranks}"
    settings = (*quick, *entry.make_rank_settings(ranks), "data.block=2", ONE_THREAD)
    return run_experiment_once(factory, key, entry.name, *settings)


def copy_as_interrupted(folder: RunFolder, step: int, target_folder: Path) -> RunFolder:
    """Copy a run, and change the copy into a run that was killed shortly after `step`, its last checkpoint."""
    shutil.copytree(folder.path, target_folder / folder.path.name)
    copy = RunFolder(target_folder / folder.path.name)
    (copy.path / "result.json").unlink()
    attempt = copy.list_attempts()[-1]
    first_step = attempt.parent_record[1] if attempt.parent_record else 0
    for checkpoint in storage.list_checkpoints(attempt):
        if checkpoint.step > step:
            shutil.rmtree(checkpoint.path)
    for pointer in ("latest", "best"):
        name = storage.read_pointer_file(attempt, pointer)
        if name is not None and int(name.removeprefix("step-")) > step:
            (storage.get_checkpoints_dir(attempt) / pointer).unlink()
    rows = attempt.metrics_file.read_text().splitlines(keepends=True)
    kept_rows = rows[: step - first_step + 2]
    partial_row = '{"global_step": 99, "lo'
    attempt.metrics_file.write_text("".join(kept_rows) + partial_row)
    return copy


def resume_run(
    entry: Entry,
    folder: RunFolder,
    *arguments: str,
    disabled_protection: str = "",
    real_process: bool = False,
    timeout: float = 120,
    status: int | None = 0,
) -> CompletedProcess[str]:
    """Resume a run, without a protection of tests/harness/runs/disabled_protection.py if one is named.

    Its exit status is checked, unless `status` is None.
    """
    prefix = []
    if disabled_protection:
        prefix = ["-m", "tests.harness.runs.disabled_protection", disabled_protection]
    script = str(ROOT / "experiments" / f"{entry.name}.py")
    argv = [sys.executable, *prefix, script, "--resume", str(folder.path), *arguments]
    return execution.execute_command(
        argv, env=make_environment(), timeout=timeout, real_process=real_process, status=status
    )


def read_compared_rows(folder: RunFolder) -> list[tuple[Any, ...]]:
    """Return the rows of all metrics without times."""
    rows = []
    for row in folder.read_metrics():
        values = tuple(row.get(column) for column in COMPARED_COLUMNS)
        rows.append(values)
    return rows


def list_trained_steps(folder: RunFolder) -> list[int]:
    return [row["global_step"] for row in folder.read_metrics() if "test_loss" not in row]


def load_final_state(folder: RunFolder) -> dict[str, torch.Tensor]:
    """Return the parameters and the optimizer state of all ranks in the last checkpoint."""
    (attempt, _), *_ = folder.trace_attempts()
    path = storage.list_checkpoints(attempt)[-1].path
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("rank-*.pt")):
        shard = torch.load(file, weights_only=True, map_location="cpu")
        tensors |= shard["model"]
        for key, value in shard["common"].get("scaler", {}).items():
            tensors[f"scaler/{key}"] = torch.tensor(value)
        tensors |= collect_optimizer_tensors(shard["optimizer"])
        worker = shard["local"].get("worker", {"vectors": {}, "optimizer": {}})  # of models that differ between ranks
        local_tensors = worker["vectors"] | collect_optimizer_tensors(worker["optimizer"])
        tensors |= {f"{file.stem}/{name}": tensor for name, tensor in local_tensors.items()}
    return tensors


def collect_optimizer_tensors(optimizer: dict[str, dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the tensors of an optimizer's state, by parameter and name."""
    tensors = {}
    for name, state in optimizer.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}/{key}"] = value
    return tensors


def find_differences(run: RunFolder, other_run: RunFolder) -> list[str]:
    """Return the differences of two runs in rows, scores and final state, which are compared bit for bit."""
    differing = []
    if read_compared_rows(run) != read_compared_rows(other_run):
        differing.append("rows")
    if run.result.get("scores") != other_run.result.get("scores"):
        differing.append("test_loss of the result")
    state = load_final_state(run)
    other_state = load_final_state(other_run)
    for name in sorted(state.keys() | other_state.keys()):
        is_in_both = name in state and name in other_state
        if not is_in_both or not torch.equal(state[name], other_state[name]):
            differing.append(name)
    return differing


def check_resume(
    entry: Entry,
    complete_run: FinishedRun,
    seed_name: str,
    target_folder: Path,
    *arguments: str,
    real_process: bool = False,
) -> RunFolder:
    """Interrupt a copy of a run after a random checkpoint, resume it, and compare the two runs bit for bit."""
    (attempt,) = complete_run.folder.list_attempts()
    checkpoints = storage.list_checkpoints(attempt)
    step = create_random(seed_name).choice(checkpoints[:-1]).step
    folder = copy_as_interrupted(complete_run.folder, step, target_folder)
    process = resume_run(entry, folder, *arguments, real_process=real_process, status=None)
    assert process.returncode == 0, f"resumed after step {step}: {process.stderr}"
    assert f"resumed from step {step}" in process.stdout, process.stdout
    differing = find_differences(folder, complete_run.folder)
    assert not differing, f"resumed after step {step}: {differing} differ"
    times = [row["time"] for row in folder.read_metrics()]
    assert times == sorted(times), "times must not decrease after a resume"
    steps = list_trained_steps(complete_run.folder)
    assert steps == list(range(1, len(steps) + 1))
    assert list_trained_steps(folder) == steps, f"resumed after step {step}"
    return folder


def check_stop_request_in_evaluation(entry: Entry, digits: tuple[str, ...], runs: Path) -> None:
    """Send a stop request in a slow evaluation. The run saves the last step, and a resume repeats the evaluation."""
    slow = (*digits, *entry.smallest_settings, "steps=20", "eval_batch=2", "data.test_limit=0", "checkpoint.grace=120")
    with start_long_run(entry.name, *slow, runs=runs) as process:
        folder = get_only_run(runs)
        wait_until(lambda: len(folder.read_metrics()) == 20, "the evaluation begins")
        process.send_signal(signal.SIGUSR2)
        out, err = process.communicate(WAIT_TIMEOUT)
    assert process.returncode == EXIT_RESUMABLE, out + err
    assert "stopped on request; checkpoint saved at step 20" in out, out + err
    assert len(folder.read_metrics()) == 20, "the evaluation must be interrupted"
    assert [checkpoint.step for checkpoint in storage.list_resumable_checkpoints(folder)] == [20]

    resume_run(entry, folder, "data.test_limit=100")
    rows = read_compared_rows(folder)
    assert [row[0] for row in rows] == [*range(1, 21), 20], "the evaluation was not repeated"
    assert rows[-1][-1] == 100
