"""With the backend `builtin`, resumed runs are bitwise equal, and runs end when a rank dies or hangs."""

from __future__ import annotations

import json
from pathlib import Path

from common.config import config
from common.runs.folder import read_json
from configs import ddp_multinode
from tests.harness.commands.processes import FinishedRun, Settings, get_only_run, run_experiment
from tests.harness.experiments.registry import REPLICATED_ENTRY
from tests.harness.runs.long_runs import ENDLESS_SETTINGS, check_hanging_rank, check_killed_rank, start_long_run
from tests.harness.runs.resuming import ONE_THREAD, check_resume, list_trained_steps, resume_run
from tests.harness.runs.tracked_runs import inspect_wandb_folder

CHAIN = """
from os import getpid

def add_along_a_chain(ranks):
    with open('CALLS', "a") as file:
        print(getpid(), file=file)
    inner = range(1, ranks - 1)
    middle = [[("add", 0, r - 1), ("send", 0, r + 1), ("receive", 0, r + 1), ("send", 0, r - 1)] for r in inner]
    return [[("send", 0, 1), ("receive", 0, 1)], *middle, [("add", 0, ranks - 2), ("send", 0, ranks - 2)]]
"""
BUILTIN = ("launch.backend=builtin", "launch.algorithm=tree")


def train_uninterrupted(tmp_path: Path, quick: Settings, *settings: str) -> FinishedRun:
    """Train three ranks to the end."""
    common = (*quick, *REPLICATED_ENTRY.make_rank_settings(3), ONE_THREAD, "steps=12", "launch.backend=builtin")
    uninterrupted = run_experiment(REPLICATED_ENTRY.name, *common, *settings, runs=tmp_path / "uninterrupted")
    return uninterrupted


def test_a_run_with_a_custom_algorithm_resumes_bitwise_equal(tmp_path: Path, quick: Settings) -> None:
    """The run has a copy of the file, which rank 0 reads for all ranks."""
    algorithm_file = tmp_path / "own.py"
    calls = tmp_path / "calls"
    algorithm_file.write_text(CHAIN.replace("CALLS", str(calls)))
    uninterrupted = train_uninterrupted(tmp_path, quick, f"launch.algorithm={algorithm_file}:add_along_a_chain")
    processes = set(calls.read_text().split())
    assert len(processes) == 2, "the function is called by the command, which checks it, and by rank 0"
    algorithm_file.unlink()
    check_resume(REPLICATED_ENTRY, uninterrupted, "builtin", tmp_path / "cut")


def test_the_algorithm_is_measured_once_and_stored_beside_the_config(tmp_path: Path, quick: Settings) -> None:
    uninterrupted = train_uninterrupted(tmp_path, quick, "launch.algorithm=auto")
    run_path = uninterrupted.folder.path
    algorithm = config.read_settings(run_path)["launch.algorithm"]
    assert algorithm != "auto"
    assert "launch.algorithm=auto: " in uninterrupted.stdout
    cfg = config.load_config(ddp_multinode.Config, ["--config", str(run_path / "config.yaml")], {})
    assert algorithm in config.format_yaml(cfg)
    resumed_folder = check_resume(REPLICATED_ENTRY, uninterrupted, "auto", tmp_path / "cut")
    assert config.read_settings(resumed_folder.path) == config.read_settings(run_path)


def test_the_measured_algorithm_is_tracked(tmp_path: Path, digits: Settings) -> None:
    settings = (*digits, *REPLICATED_ENTRY.smallest_settings, *BUILTIN, "launch.algorithm=auto", "wandb.mode=offline")
    completed = run_experiment(
        REPLICATED_ENTRY.name, *settings, runs=tmp_path / "runs", WANDB_MODE="", HOME=str(tmp_path)
    )
    algorithm = config.read_settings(completed.folder.path)["launch.algorithm"]
    assert algorithm != "auto"
    tracked_config = json.loads(inspect_wandb_folder(completed.folder, "--summary"))["config"]
    assert tracked_config["launch"]["algorithm"] == algorithm


def test_an_encrypted_run_resumes_bitwise_equal_with_a_new_key(tmp_path: Path, quick: Settings) -> None:
    uninterrupted = train_uninterrupted(tmp_path, quick, "launch.tls=true", "launch.transport=network")
    folder = check_resume(REPLICATED_ENTRY, uninterrupted, "tls", tmp_path / "cut")
    encrypted = [read_json(attempt.attempt_folder / "world.json")["tls"] for attempt in folder.list_attempts()]
    assert encrypted == [True, True]


def test_a_killed_rank_ends_the_run_which_can_be_resumed(tmp_path: Path, quick: Settings) -> None:
    settings = (*quick, *REPLICATED_ENTRY.make_rank_settings(2), *BUILTIN, *ENDLESS_SETTINGS)
    timing = ("checkpoint.every_steps=3", "launch.step_timeout=600")
    with start_long_run(REPLICATED_ENTRY.name, *settings, *timing, runs=tmp_path) as process:
        check_killed_rank(process, tmp_path)
    folder = get_only_run(tmp_path)
    steps = max(list_trained_steps(folder)) + 5
    resume_run(REPLICATED_ENTRY, folder, f"steps={steps}")
    assert list_trained_steps(folder) == list(range(1, steps + 1))


def test_a_hanging_rank_is_named(tmp_path: Path, quick: Settings) -> None:
    check_hanging_rank(REPLICATED_ENTRY, (*quick, *BUILTIN), tmp_path, seconds=2)
