"""Elastic runs on three hosts: they go on without what is lost, and have the numbers of one process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from common.runs.folder import RunFolder
from common.runs.rank_changes import read_rank_changes
from tests.cluster.lab import Lab, Running
from tests.harness.elastic_runs import differences, list_changes
from tests.harness.processes import run
from tests.harness.site import until

pytestmark = pytest.mark.timeout(300)
MODEL = ("data.name=vectors", "data.samples=2400", "batch=24", "model=mlp", "dtype=float64")
# a lost rank must be back before the end, also on a busy machine
LONG, SHORT = ("steps=2400", "epochs=24"), ("steps=240", "epochs=3")
SETTINGS = ("optim.lr=0.01", "optim.base_batch=0", "launch.device=cpu", "launch.threads=1")
FAILING = """
import os

train = main


def main(cfg, run):
    if run.world.rank == 1 and "SLURM_RESTART_COUNT" in os.environ:
        raise ValueError("planted")
    train(cfg, run)
"""


def train_alone(cache: Path, runs: Path, *words: str) -> RunFolder:
    """The run of one process that nothing disturbs."""
    words = (*MODEL, *SETTINGS, f"data.cache={cache}", "processes_per_node=1", *words)
    return run("ddp_multinode", *words, runs=runs).folder


def submit(lab: Lab, *words: str, nodes: int = 3) -> Running:
    lab.up()
    return lab.submit_on(nodes, "ddp_multinode", *MODEL, *SETTINGS, "data.workers=0", "elastic=true", *words)


def changes(running: Running) -> list[tuple[list[int], list[int]]]:
    """Of each change so far, who was lost and who joined."""
    return [(one["lost"], one["joined"]) for one in read_rank_changes(running.newest())]


def test_a_killed_rank_and_a_cut_host_come_back_and_a_dead_host_does_not(lab: Lab, cache: Path, tmp_path: Path) -> None:
    running = submit(lab, *LONG)
    running.wait_for_step(20)
    hosts = running.hosts()
    os.kill(running.ranks()[0], signal.SIGKILL)
    until("rank 0 is back", lambda: changes(running)[-1:] == [([], [0])], 60, 0.1)
    lab.tool("cut", hosts[1])
    until("rank 1 is lost", lambda: changes(running)[-1:] == [([1], [])], 20, 0.1)
    lab.tool("join", hosts[1])
    until("rank 1 is back", lambda: changes(running)[-1:] == [([], [1])], 60, 0.1)
    lab.tool("power-off", hosts[2])
    running.finish()
    assert running.folder.result["state"] == "finished" and len(running.folder.list_attempts()) == 1
    assert list_changes(running.folder) == [([0], []), ([], [0]), ([1], []), ([], [1]), ([2], [])]
    assert not differences(running.folder, train_alone(cache, tmp_path, *LONG))
    until("SLURM knows that the job is over", lambda: running.state() == "COMPLETED", 60, 0.2)
    lab.tool("power-on", hosts[2])


@pytest.mark.parametrize("step", [0, 20])
def test_a_job_that_loses_its_first_host_is_queued_again(step: int, lab: Lab, cache: Path, tmp_path: Path) -> None:
    """With it are gone its script, the launcher and the coordinator: SLURM alone would let the rest wait.

    Before the first step its ranks may not have met yet.
    """
    running = submit(lab, *SHORT, "launch.setup_timeout=10", nodes=2)
    if step:
        running.wait_for_step(step)
    else:
        until("the ranks begin", lambda: len(running.ranks()) == 2, 60, 0.05)
    first = running.hosts()[0]
    lab.tool("power-off", first)
    running.finish()
    attempts = running.folder.list_attempts()
    assert running.folder.result["state"] == "finished" and len(attempts) == (2 if step else 1)
    if step:
        assert attempts[1].parent_record is not None and attempts[1].parent_record[1] >= step
    assert not differences(running.folder, train_alone(cache, tmp_path, *SHORT))
    until("SLURM knows that the job is over", lambda: running.state() == "COMPLETED", 60, 0.2)
    lab.tool("power-on", first)


def test_too_few_ranks_save_and_an_error_ends_the_job(lab: Lab, cache: Path, tmp_path: Path) -> None:
    """The first attempt is queued again; the second and the third one reach no step, and that is one too many."""
    running = submit(lab, *SHORT, "elastic.min=3", "checkpoint.max_restarts=0")
    with open(running.folder.path / "code/experiments/ddp_multinode.py", "a") as source:
        source.write(FAILING)
    running.wait_for_step(20)
    os.kill(running.ranks()[2], signal.SIGKILL)
    running.finish()
    result, attempts = running.folder.result, running.folder.list_attempts()
    assert (result["state"], result["exit_status"], len(attempts)) == ("failed", 1, 3), result
    assert any("ValueError: planted" in log.read_text() for log in running.folder.path.glob("submit/*_1_log.out"))
    rows, expected = list(attempts[0].read_attempt_rows()), train_alone(cache, tmp_path, *SHORT).read_metrics()
    assert attempts[1].find_last_step() == rows[-1]["global_step"] >= 20
    losses = [[row["loss"] for row in given if "loss" in row] for given in (rows, expected)]
    assert losses[0] == pytest.approx(losses[1][: len(losses[0])], abs=1e-9)
