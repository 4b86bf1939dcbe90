"""A rank that cannot reach its coordinator: it requeues or ends the job, or only leaves it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from common.runs.folder import RunFolder
from tests.harness.commands.exit_status import Completed
from tests.harness.slurm.fake_slurm import FakeSlurm, execute_module, execute_module_on_full_disk
from tests.unit.slurm.scheduling.job_states import JOB, make_state_script

UNREACHABLE = "127.0.0.1:9"
RUNNING = "JobState=RUNNING Restarts=1 NodeList"
REQUEUE = "scontrol requeue 7"
CANCEL = "scancel 7"


@pytest.fixture
def folder(runs: Path) -> RunFolder:
    """The folder of an elastic run that was submitted as job 7."""
    folder = RunFolder.create(runs, "ddp_multinode", "")
    (folder.path / "meta.json").write_text(json.dumps({"job": {"id": "7"}}))
    return folder


def answer_with_states(fake: FakeSlurm, *states: str, requeue: str = "exit 0") -> None:
    """Let scontrol show the states of the job in turn, with one host in a list."""
    show_job = make_state_script(fake, *states)
    fake.define_command(
        "scontrol", f'case "$*" in requeue*) {requeue};; "show hostnames"*) echo "$3";; *) {show_job};; esac'
    )


def run_orphan(
    fake: FakeSlurm, folder: RunFolder, *states: str, coordinator: str = UNREACHABLE, requeue: str = "exit 0"
) -> Completed:
    """Run the command of a rank on node1. SLURM shows the states of the job in turn, with one host in a list."""
    answer_with_states(fake, *states, requeue=requeue)
    variables = JOB | {"ELASTIC_COORDINATOR": coordinator}
    process = execute_module(fake, "slurm.scheduling.orphaned_rank", str(folder.path), "node1", **variables)
    return process


def count_calls(fake: FakeSlurm, command: str) -> int:
    return fake.calls_file.read_text().splitlines().count(command) if fake.calls_file.exists() else 0


def test_a_job_that_has_lost_its_first_host_is_requeued(fake: FakeSlurm, folder: RunFolder) -> None:
    """The rank waits until SLURM has lost the first host: until then, only this host may be disconnected."""
    process = run_orphan(fake, folder, f"{RUNNING}=node1", f"{RUNNING}=node2")
    assert "the first host is lost; requeueing job 7" in process.stdout, process.stderr
    assert count_calls(fake, REQUEUE) == 1
    assert not count_calls(fake, CANCEL)
    assert count_calls(fake, "scontrol -o show job 7") == 3
    assert not folder.result


def test_a_job_whose_log_is_on_a_full_disk_is_requeued(fake: FakeSlurm, folder: RunFolder) -> None:
    answer_with_states(fake, f"{RUNNING}=node2")
    variables = JOB | {"ELASTIC_COORDINATOR": UNREACHABLE}
    execute_module_on_full_disk(fake, "slurm.scheduling.orphaned_rank", str(folder.path), "node1", **variables)
    assert count_calls(fake, REQUEUE) == 1


def test_a_rank_whose_coordinator_answers_only_leaves(fake: FakeSlurm, folder: RunFolder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        run_orphan(fake, folder, f"{RUNNING}=node2", coordinator=f"127.0.0.1:{listener.getsockname()[1]}")
    assert not count_calls(fake, REQUEUE)


@pytest.mark.parametrize(
    "state", ["JobState=PENDING Restarts=2 NodeList=", "JobState=RUNNING Restarts=2 NodeList=node2"]
)
def test_a_job_that_another_rank_has_requeued_is_not_changed(fake: FakeSlurm, folder: RunFolder, state: str) -> None:
    run_orphan(fake, folder, state)
    assert not count_calls(fake, REQUEUE)
    assert not folder.result


def test_a_job_that_cannot_be_requeued_is_canceled(fake: FakeSlurm, folder: RunFolder) -> None:
    """Its script is lost, so nothing else would end the job before its time limit."""
    run_orphan(fake, folder, f"{RUNNING}=node2", requeue="echo 'requeue is disabled' >&2; exit 1")
    assert count_calls(fake, CANCEL) == 1
    assert folder.result["state"] == "failed"
    assert "requeue is disabled" in folder.result["reason"]
