"""Runs whose ranks were started by torchrun."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from common.runs.folder import read_json
from common.system.exit_status import EXIT_RESUMABLE
from tests.harness.commands import execution
from tests.harness.commands.processes import (
    WAIT_TIMEOUT,
    get_only_run,
    make_environment,
    make_run_command,
    run_experiment,
    wait_until,
)
from tests.harness.runs.long_runs import find_free_port


def start_two_ranks(argv: Sequence[str]) -> list[execution.Command]:
    """Start a command twice, with the variables that torchrun sets for two ranks."""
    variables = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
    }
    ranks = []
    for rank in ("0", "1"):
        rank_environment = make_environment(**variables, RANK=rank, LOCAL_RANK=rank)
        ranks.append(execution.Command(argv, env=rank_environment, new_session=True))
    return ranks


@pytest.fixture
def one_rank() -> dict[str, Any]:
    """The variables that torchrun sets for the only rank of a run."""
    return {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}


def test_ranks_that_are_stopped_before_the_first_step_exit_at_once(tmp_path: Path, cache: Path) -> None:
    """One rank waits for a message of the other, which exits."""
    settings = (f"runs={tmp_path / 'runs'}", "data.name=digits", f"data.cache={cache}", "launch.step_timeout=100")
    ranks = start_two_ranks([sys.executable, "-m", "tests.harness.ranks.waiting_ranks", *settings])
    wait_until(lambda: all("waiting" in rank.stdout for rank in ranks), "both ranks wait in main()")
    for rank in ranks:
        rank.send_signal(signal.SIGUSR2)
    statuses = [rank.wait(WAIT_TIMEOUT) for rank in ranks]
    errors = ranks[0].stderr + ranks[1].stderr
    assert statuses == [EXIT_RESUMABLE, EXIT_RESUMABLE], errors
    assert "Traceback" not in errors

    folder = get_only_run(tmp_path / "runs")
    assert folder.result["reason"] == "stopped on request, before the first step"
    assert f"no checkpoint found; to restart from step 0: make exp RESUME={folder.path}\n" in ranks[0].stderr


def test_ranks_of_torchrun_have_the_losses_of_forked_ranks(tmp_path: Path, digits: tuple[str, ...]) -> None:
    forked_run = run_experiment("mnist_pipeline", *digits, runs=tmp_path / "forked")
    ranks = start_two_ranks(make_run_command("mnist_pipeline", *digits, runs=tmp_path / "torchrun"))
    statuses = [rank.wait(WAIT_TIMEOUT) for rank in ranks]
    assert statuses == [0, 0], ranks[0].stderr + ranks[1].stderr

    folder = get_only_run(tmp_path / "torchrun")
    losses = [row["loss"] for row in folder.read_metrics() if "loss" in row]
    assert len(losses) == 30
    assert losses == forked_run.losses
    assert read_json(folder.path / "meta.json")["world"]["launched_by"] == "torchrun"


def test_a_wrong_number_of_ranks_is_refused(tmp_path: Path, digits: tuple[str, ...], one_rank: dict[str, Any]) -> None:
    pipeline = run_experiment("mnist_pipeline", *digits, runs=tmp_path, timeout=WAIT_TIMEOUT, status=2, **one_rank)
    remedy = "use --nproc-per-node=2, or change the number of stages"
    assert pipeline.stderr == f"error: torchrun started 1 rank, but the settings require 2; {remedy}\n"

    data_parallel = run_experiment(
        "ddp_multinode", *digits, "processes_per_node=2", runs=tmp_path, timeout=WAIT_TIMEOUT, status=2, **one_rank
    )
    assert "or change processes_per_node" in data_parallel.stderr
    assert not list(tmp_path.iterdir())


def test_the_number_of_ranks_is_that_of_torchrun(
    tmp_path: Path, digits: tuple[str, ...], one_rank: dict[str, Any]
) -> None:
    finished_run = run_experiment("ddp_multinode", *digits, "steps=3", runs=tmp_path, **one_rank)
    assert finished_run.returncode == 0, finished_run.stderr
    assert len(finished_run.losses) == 3
    assert read_json(finished_run.folder.path / "meta.json")["world"]["processes"] == 1
