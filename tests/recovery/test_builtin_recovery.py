"""With the backend `builtin`, resumed runs are bitwise equal, and runs end when a rank dies or hangs."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from common.config import config
from common.runs.folder import read_json
from configs import ddp_multinode
from tests.harness.commands.processes import WAIT_TIMEOUT, FinishedRun, find_processes, run_experiment
from tests.harness.experiments.registry import REPLICATED
from tests.harness.runs.long_runs import ENDLESS, check_hanging_rank, only_folder, ranks_of, train_long
from tests.harness.runs.resuming import ALONE, check_that_it_goes_on, resume, trained_steps
from tests.harness.runs.tracked_runs import inspect

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


def train_uninterrupted(tmp_path: Path, quick: tuple[str, ...], *settings: str) -> FinishedRun:
    """Train three ranks to the end."""
    common = (*quick, *REPLICATED.spread(3), ALONE, "steps=12", "launch.backend=builtin")
    uninterrupted = run_experiment(REPLICATED.name, *common, *settings, runs=tmp_path / "uninterrupted")
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    return uninterrupted


def test_a_run_with_a_custom_algorithm_resumes_bitwise_equal(tmp_path: Path, quick: tuple[str, ...]) -> None:
    """The run has a copy of the file, which rank 0 reads for all ranks."""
    algorithm_file = tmp_path / "own.py"
    calls = tmp_path / "calls"
    algorithm_file.write_text(CHAIN.replace("CALLS", str(calls)))
    uninterrupted = train_uninterrupted(tmp_path, quick, f"launch.algorithm={algorithm_file}:add_along_a_chain")
    processes = set(calls.read_text().split())
    assert len(processes) == 2, "the function is called by the command, which checks it, and by rank 0"
    algorithm_file.unlink()
    check_that_it_goes_on(REPLICATED, uninterrupted, "builtin", tmp_path / "cut")


def test_the_algorithm_is_measured_once_and_stored_beside_the_config(tmp_path: Path, quick: tuple[str, ...]) -> None:
    uninterrupted = train_uninterrupted(tmp_path, quick, "launch.algorithm=auto")
    run_path = uninterrupted.folder.path
    algorithm = config.read_settings(run_path)["launch.algorithm"]
    assert algorithm != "auto"
    assert "launch.algorithm=auto: " in uninterrupted.stdout
    cfg = config.load_config(ddp_multinode.Config, ["--config", str(run_path / "config.yaml")], {})
    assert algorithm in config.format_yaml(cfg)
    resumed_folder = check_that_it_goes_on(REPLICATED, uninterrupted, "auto", tmp_path / "cut")
    assert config.read_settings(resumed_folder.path) == config.read_settings(run_path)


def test_the_measured_algorithm_is_tracked(tmp_path: Path, digits: tuple[str, ...]) -> None:
    settings = (*digits, *REPLICATED.smallest, *BUILTIN, "launch.algorithm=auto", "wandb.mode=offline")
    completed = run_experiment(REPLICATED.name, *settings, runs=tmp_path / "runs", WANDB_MODE="", HOME=str(tmp_path))
    assert completed.returncode == 0, completed.stderr
    algorithm = config.read_settings(completed.folder.path)["launch.algorithm"]
    assert algorithm != "auto"
    tracked_config = json.loads(inspect(completed.folder, "--summary"))["config"]
    assert tracked_config["launch"]["algorithm"] == algorithm


def test_an_encrypted_run_resumes_bitwise_equal_with_a_new_key(tmp_path: Path, quick: tuple[str, ...]) -> None:
    uninterrupted = train_uninterrupted(tmp_path, quick, "launch.tls=true", "launch.transport=network")
    folder = check_that_it_goes_on(REPLICATED, uninterrupted, "tls", tmp_path / "cut")
    encrypted = [read_json(attempt.attempt_folder / "world.json")["tls"] for attempt in folder.list_attempts()]
    assert encrypted == [True, True]


def test_a_killed_rank_ends_the_run_which_can_be_resumed(tmp_path: Path, quick: tuple[str, ...]) -> None:
    settings = (*quick, *REPLICATED.spread(2), *BUILTIN, *ENDLESS)
    timing = ("checkpoint.every_steps=3", "launch.step_timeout=600")
    with train_long(REPLICATED.name, *settings, *timing, runs=tmp_path) as process:
        os.kill(ranks_of(process)[1], signal.SIGKILL)
        _, err = process.communicate(WAIT_TIMEOUT)
        assert process.returncode == 128 + signal.SIGKILL
        assert "error: rank 1 (pid" in err
        assert "killed by SIGKILL" in err
        assert "Traceback" not in err
    assert not find_processes(str(tmp_path))
    folder = only_folder(tmp_path)
    steps = max(trained_steps(folder)) + 5
    resumed = resume(REPLICATED, folder, f"steps={steps}")
    assert resumed.returncode == 0, resumed.stderr
    assert trained_steps(folder) == list(range(1, steps + 1))


def test_a_hanging_rank_is_named(tmp_path: Path, quick: tuple[str, ...]) -> None:
    check_hanging_rank(REPLICATED, (*quick, *BUILTIN), tmp_path, seconds=2)
