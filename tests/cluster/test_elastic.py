"""Elastic runs on three hosts: they continue without lost ranks, and reproduce the losses of one process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from common.runs.folder import RunFolder
from common.runs.rank_changes import read_rank_changes
from tests.cluster.lab import Lab, Running
from tests.harness.commands.processes import run_experiment
from tests.harness.elastic.faulty_runs import find_metric_differences, list_world_changes
from tests.harness.slurm.cluster_site import wait_on_cluster

pytestmark = pytest.mark.timeout(500)
MODEL = ("data.name=vectors", "data.samples=2400", "batch=24", "model=mlp", "dtype=float64")
LONG = ("steps=2400", "epochs=24")  # a lost rank must return before the end, also on a busy machine
SHORT = ("steps=240", "epochs=3")
SETTINGS = ("optim.lr=0.01", "optim.base_batch=0", "launch.device=cpu", "launch.threads=1")
FAILING = """
import os

train = main


def main(cfg, run):
    if run.world.rank == 1 and "SLURM_RESTART_COUNT" in os.environ:
        raise ValueError("planted")
    train(cfg, run)
"""


def train_one_process(cache: Path, runs: Path, *settings: str) -> RunFolder:
    """Return an undisturbed run of one process."""
    settings = (*MODEL, *SETTINGS, f"data.cache={cache}", "processes_per_node=1", *settings)
    return run_experiment("ddp_multinode", *settings, runs=runs).folder


def submit(lab: Lab, *settings: str, nodes: int = 3) -> Running:
    lab.up()
    return lab.submit_on(nodes, "ddp_multinode", *MODEL, *SETTINGS, "data.workers=0", "elastic=true", *settings)


def wait_for_change(running: Running, lost: list[int], joined: list[int], seconds: float) -> None:
    """Wait until the last change of the ranks is this one."""

    def has_changed() -> bool:
        changes = read_rank_changes(running.newest())
        return bool(changes) and (changes[-1]["lost"], changes[-1]["joined"]) == (lost, joined)

    wait_on_cluster(f"lost ranks {lost}, joined ranks {joined}", has_changed, seconds, 0.1)


def wait_until_completed(running: Running) -> None:
    wait_on_cluster("SLURM knows that the job is over", lambda: running.state() == "COMPLETED", 60, 0.2)


def read_losses(rows: Iterable[dict[str, Any]]) -> list[float]:
    return [row["loss"] for row in rows if "loss" in row]


def test_a_killed_rank_and_a_cut_host_come_back_and_a_dead_host_does_not(lab: Lab, cache: Path, tmp_path: Path) -> None:
    running = submit(lab, *LONG)
    running.wait_for_step(20)
    hosts = running.hosts()
    os.kill(running.ranks()[0], signal.SIGKILL)
    wait_for_change(running, [], [0], 180)
    lab.tool("cut", hosts[1])
    wait_for_change(running, [1], [], 20)
    lab.tool("join", hosts[1])
    wait_for_change(running, [], [1], 180)
    lab.tool("power-off", hosts[2])
    running.finish()
    assert running.folder.result["state"] == "finished"
    assert len(running.folder.list_attempts()) == 1
    assert list_world_changes(running.folder) == [([0], []), ([], [0]), ([1], []), ([], [1]), ([2], [])]
    assert not find_metric_differences(running.folder, train_one_process(cache, tmp_path, *LONG))
    wait_until_completed(running)
    lab.tool("power-on", hosts[2])


@pytest.mark.parametrize("step", [0, 20])
def test_a_job_that_loses_its_first_host_is_requeued(step: int, lab: Lab, cache: Path, tmp_path: Path) -> None:
    """The first host runs the script, the launcher and the coordinator; SLURM alone would let the other ranks wait.

    Before the first step, the ranks may not be connected yet.
    """
    running = submit(lab, *SHORT, "launch.setup_timeout=10", nodes=2)
    if step:
        running.wait_for_step(step)
    else:
        wait_on_cluster("the ranks begin", lambda: len(running.ranks()) == 2, 60, 0.05)
    first = running.hosts()[0]
    lab.tool("power-off", first)
    running.finish()
    attempts = running.folder.list_attempts()
    assert running.folder.result["state"] == "finished"
    if step:
        _, second_attempt = attempts
        assert second_attempt.parent_record is not None
        assert second_attempt.parent_record[1] >= step
    else:
        assert len(attempts) == 1
    assert not find_metric_differences(running.folder, train_one_process(cache, tmp_path, *SHORT))
    wait_until_completed(running)
    lab.tool("power-on", first)


def test_too_few_ranks_save_and_repeated_errors_end_the_job(lab: Lab, cache: Path, tmp_path: Path) -> None:
    """The first attempt is requeued; the second and the third one reach no step, which ends the job."""
    running = submit(lab, *SHORT, "elastic.min=3", "checkpoint.max_restarts=0")
    with open(running.folder.path / "code/experiments/ddp_multinode.py", "a") as source:
        source.write(FAILING)
    running.wait_for_step(20)
    os.kill(running.ranks()[2], signal.SIGKILL)
    running.finish()
    result = running.folder.result
    attempts = running.folder.list_attempts()
    assert (result["state"], result["exit_status"], len(attempts)) == ("failed", 1, 3), result
    assert any("ValueError: planted" in log.read_text() for log in running.folder.path.glob("submit/*_1_log.out"))
    rows = list(attempts[0].read_attempt_rows())
    assert attempts[1].find_last_step() == rows[-1]["global_step"] >= 20
    losses = read_losses(rows)
    expected = read_losses(train_one_process(cache, tmp_path, *SHORT).read_metrics())
    assert losses == pytest.approx(expected[: len(losses)], abs=1e-9)
