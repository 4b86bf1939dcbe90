"""Launcher of an elastic job: messages of srun, lost hosts, and the command of a rank."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.config import config
from common.ranks.rank_info import COORDINATOR_KEY_VARIABLE, COORDINATOR_VARIABLE
from common.runs.folder import RunFolder
from common.system import network
from common.techniques.elastic.coordinator import EndReason
from configs.dataparallel import Elastic
from configs.profile import Profile
from slurm.scheduling import sbatch
from slurm.scheduling.elastic_launcher import KILLED, JobLauncher, JobStep
from slurm.scheduling.scheduler import Scheduler
from tests.harness.commands.processes import wait_until
from tests.harness.slurm.fake_slurm import FakeSlurm, execute_module_on_full_disk

SRUN_MESSAGES = """srun: error: node2: tasks 0,2-3: Killed
srun: error: node1: task 1: Exited with exit code 76
srun: error: node3: task 4: Segmentation fault (core dumped)
srun: error: Node failure on node3
"""


def test_messages_of_srun_contain_ended_ranks_and_lost_hosts() -> None:
    command = ["sh", "-c", 'printf "%s" "$1" >&2', "sh", SRUN_MESSAGES]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    process.wait()
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    step = JobStep(process, [5, 6, 7, 8, 9])
    assert list(step.read_ended_ranks()) == [(5, KILLED), (7, KILLED), (8, KILLED), (6, 76), (9, KILLED)]
    assert not list(step.read_ended_ranks())
    assert step.lost_hosts == {"node3"}


def test_the_loss_of_an_irreplaceable_rank_ends_the_job_before_slurm_notices_it() -> None:
    """SLURM needs minutes to notice that a host is disconnected."""
    launcher = JobLauncher.__new__(JobLauncher)
    launcher.steps = []
    launcher.failed_status = 0
    launcher.coordinator = SimpleNamespace(end_reason=None)  # type: ignore[assignment]
    launcher.handle_srun_messages()
    assert not launcher.failed_status
    launcher.coordinator.end_reason = EndReason.SHARD_LOST
    launcher.handle_srun_messages()
    assert launcher.failed_status == KILLED


MakeLauncher = Callable[[list[str]], JobLauncher]


@pytest.fixture
def make_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeLauncher]:
    """Make the launcher of two ranks on two hosts from a command. No rank is started."""
    launchers: list[JobLauncher] = []
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node1,node2")
    monkeypatch.setattr(Scheduler, "run_command", lambda *_: "node1\nnode2\n")
    monkeypatch.setattr(network, "resolve_for_other_hosts", lambda *_: "127.0.0.1")
    settings = {"elastic": "true", "launch.nodes": "2", "processes_per_node": "1"}
    cfg = config.build_config(config.import_schema("ddp_multinode"), [settings])

    def make(command: list[str]) -> JobLauncher:
        launchers.append(JobLauncher(RunFolder(tmp_path), cfg, command))
        return launchers[-1]

    yield make
    for launcher in launchers:
        launcher.coordinator.close()


def test_the_job_script_separates_the_options_of_srun_from_the_command_of_a_rank(
    tmp_path: Path, make_launcher: MakeLauncher
) -> None:
    """The interpreter of the script may be a wrapper, with another path than that of the launcher itself."""
    elastic = Elastic(on=True)
    profile = Profile(container=["--chdir=/tmp"])
    parameters = sbatch.make_submitit_parameters(profile, "x", 2, 1, tmp_path, elastic=elastic)
    script = sbatch.make_executor(RunFolder(tmp_path), None, parameters, elastic).make_job_script()
    (line,) = (line for line in script.splitlines() if "elastic_launcher" in line)
    _, arguments = line.replace(sys.executable, "/opt/wrapper/python").split(f" {tmp_path} ", 1)
    launcher = make_launcher(shlex.split(arguments))
    assert launcher.options[0] == "srun"
    assert launcher.options[-1] == "--chdir=/tmp"
    assert launcher.task == ["/opt/wrapper/python", "-u", "-m", "submitit.core._submit", f"{tmp_path}/submit"]


def connect_rank(launcher: JobLauncher, rank: int) -> socket.socket:
    """Connect to the coordinator as a rank does at its start."""
    host, _, port = launcher.environ[COORDINATOR_VARIABLE].rpartition(":")
    connection = socket.create_connection((host, int(port)))
    key = launcher.environ[COORDINATOR_KEY_VARIABLE]
    hello = {"hello": rank, "key": key, "joins": False, "irreplaceable": False, "pid": 9}
    connection.sendall(json.dumps(hello).encode() + b"\n")
    return connection


def wait_for_connected_ranks(launcher: JobLauncher, ranks: set[int]) -> None:
    def are_connected() -> bool:
        launcher.supervisor.poll_and_restart_ranks(())
        return launcher.coordinator.connected_ranks == ranks

    wait_until(are_connected, f"the connected ranks are {ranks}")


def test_the_job_continues_while_ranks_are_connected_that_srun_reports_as_ended(make_launcher: MakeLauncher) -> None:
    """If the daemon of a host has ended, its ranks train to the end and write the result."""
    launcher = make_launcher(["srun", "--", "true"])
    launcher.start_job_step([0, 1], ["sh", "-c", "exit 0"], [], {})
    launcher.steps[0].process.wait()
    connections = [connect_rank(launcher, rank) for rank in range(2)]
    wait_for_connected_ranks(launcher, {0, 1})
    assert not launcher.is_over
    connections[0].close()
    wait_for_connected_ranks(launcher, {1})
    assert not launcher.is_over
    connections[1].close()
    wait_for_connected_ranks(launcher, set())
    assert launcher.is_over


def test_a_rank_remains_lost_if_srun_cannot_be_started(make_launcher: MakeLauncher) -> None:
    """The supervisor starts the rank again later."""
    launcher = make_launcher(["/nowhere/srun", "--", "true"])
    launcher.host_of[1] = "node2"
    launcher.lost.add(1)
    launcher.silent.add(1)
    with pytest.raises(FileNotFoundError):
        launcher.restart_rank(1)
    assert launcher.lost == launcher.silent == {1}
    assert launcher.host_of[1] == "node2"


def wait_for_srun(launcher: JobLauncher, condition: Callable[[], object], description: str) -> None:
    """Handle messages of srun until a condition holds."""

    def handle_and_check() -> object:
        launcher.handle_srun_messages()
        return condition()

    wait_until(handle_and_check, description)


def test_ranks_save_and_stop_if_slurm_has_removed_the_first_host_from_the_job(make_launcher: MakeLauncher) -> None:
    launcher = make_launcher(["srun", "--", "true"])
    exit_message = "srun: error: node2: task 1: Exited with exit code 75"
    script = f"trap 'echo {exit_message} >&2; exit 75' USR2; echo $0 >&2; while :; do sleep 0.05; done"

    def lose_host(host: str) -> None:
        command = ["sh", "-c", script, f"srun: error: Node failure on {host}"]
        launcher.start_job_step([0, 1], command, [], {})
        wait_for_srun(launcher, lambda: launcher.steps[0].lost_hosts, "srun reports the lost host")

    lose_host("node2")
    assert not launcher.leaving
    launcher.steps.pop().terminate()
    lose_host("node1")
    assert launcher.leaving
    wait_for_srun(launcher, lambda: launcher.stopped, "the ranks have stopped")


def test_the_loss_of_a_rank_is_handled_if_the_log_is_on_a_full_disk(fake: FakeSlurm, runs: Path) -> None:
    """The launcher copies the message of srun to the log and then ends the job, because no rank has connected."""
    folder = RunFolder.create(runs, "ddp_multinode", "")
    sbatch.write_settings_and_retire_result(folder, "elastic: true\n")
    fake.define_command("scontrol", "hostname")
    fake.define_command("srun", "echo 'srun: error: node1: task 1: Killed' >&2")
    arguments = (str(folder.path), "srun", "--", "true")
    status = execute_module_on_full_disk(
        fake, "slurm.scheduling.elastic_launcher", *arguments, SLURM_JOB_NODELIST="node1"
    )
    assert status == KILLED
