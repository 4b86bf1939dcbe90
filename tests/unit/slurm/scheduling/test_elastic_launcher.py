"""Messages of srun as the launcher of an elastic job reads them; tests/cluster/test_elastic.py has the rest."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
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
from tests.harness.processes import wait_until

SAID = """srun: error: node2: tasks 0,2-3: Killed
srun: error: node1: task 1: Exited with exit code 76
srun: error: node3: task 4: Segmentation fault (core dumped)
srun: error: Node failure on node3
"""


def test_srun_tells_which_ranks_have_ended_and_how() -> None:
    process = subprocess.Popen(["sh", "-c", 'printf "%s" "$1" >&2', "sh", SAID], stderr=subprocess.PIPE)
    process.wait()
    assert process.stderr is not None
    os.set_blocking(process.stderr.fileno(), False)
    step = JobStep(process, [5, 6, 7, 8, 9])
    assert list(step.read_ended_ranks()) == [(5, KILLED), (7, KILLED), (8, KILLED), (6, 76), (9, KILLED)]
    assert not list(step.read_ended_ranks()) and step.lost_hosts == {"node3"}


def test_the_loss_of_an_irreplaceable_rank_ends_the_job_though_slurm_says_nothing() -> None:
    """As where its host is cut off: SLURM takes minutes to notice."""
    launcher = JobLauncher.__new__(JobLauncher)
    launcher.steps, launcher.failed_status = [], 0
    launcher.coordinator = SimpleNamespace(end_reason=None)  # type: ignore[assignment]
    launcher.handle_srun_messages()
    assert not launcher.failed_status
    launcher.coordinator.end_reason = EndReason.SHARD_LOST
    launcher.handle_srun_messages()
    assert launcher.failed_status == KILLED


def make_launcher(path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch) -> JobLauncher:
    """The launcher of two ranks on two hosts, which have not been started."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node1,node2")
    monkeypatch.setattr(Scheduler, "run_command", lambda *_: "node1\nnode2\n")
    monkeypatch.setattr(network, "resolve_for_other_hosts", lambda *_: "127.0.0.1")
    settings = {"elastic": "true", "launch.nodes": "2", "processes_per_node": "1"}
    cfg = config.build_config(config.import_schema("ddp_multinode"), [settings])
    return JobLauncher(RunFolder(path), cfg, command)


def test_the_job_script_tells_the_command_of_a_rank_from_the_options_of_srun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the interpreter that the script names is a wrapper, and the launcher's own path is another one."""
    elastic = Elastic(on=True)
    asked = sbatch.make_submitit_parameters(Profile(container=["--chdir=/tmp"]), "x", 2, 1, tmp_path, elastic=elastic)
    text = sbatch.make_executor(RunFolder(tmp_path), None, asked, elastic).make_job_script()
    (line,) = (line for line in text.splitlines() if "elastic_launcher" in line)
    _, words = line.replace(sys.executable, "/opt/wrapper/python").split(f" {tmp_path} ", 1)
    launcher = make_launcher(tmp_path, shlex.split(words), monkeypatch)
    launcher.coordinator.close()
    assert launcher.options[0] == "srun" and launcher.options[-1] == "--chdir=/tmp"
    assert launcher.task == ["/opt/wrapper/python", "-u", "-m", "submitit.core._submit", f"{tmp_path}/submit"]


def find_present(launcher: JobLauncher) -> set[int]:
    """The ranks that have a connection."""
    launcher.supervisor.poll_and_restart_ranks(())
    return launcher.coordinator.connected_ranks


def test_ranks_are_waited_for_that_srun_counts_as_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a host whose daemon has died: they train to the end, and write the result."""
    launcher = make_launcher(tmp_path, ["srun", "--", "true"], monkeypatch)
    launcher.start_job_step([0, 1], ["sh", "-c", "exit 0"], [], {})
    launcher.steps[0].process.wait()
    host, _, port = launcher.environ[COORDINATOR_VARIABLE].rpartition(":")
    ranks = [socket.create_connection((host, int(port))) for _ in range(2)]
    for number, rank in enumerate(ranks):
        hello = {
            "hello": number,
            "key": launcher.environ[COORDINATOR_KEY_VARIABLE],
            "joins": False,
            "irreplaceable": False,
            "pid": 9,
        }
        rank.sendall(json.dumps(hello).encode() + b"\n")
    for left in ({0, 1}, {1}, set[int]()):
        wait_until(lambda left=left: find_present(launcher) == left, f"ranks {left} are there")  # type: ignore[misc]
        assert launcher.is_over == (not left)
        if left:
            ranks[min(left)].close()
    launcher.coordinator.close()


def tell(launcher: JobLauncher) -> bool:
    """Let it read what srun has said."""
    launcher.handle_srun_messages()
    return True


def test_ranks_save_and_stop_where_slurm_has_taken_the_first_host_off_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = make_launcher(tmp_path, ["srun", "--", "true"], monkeypatch)
    ending = "srun: error: node2: task 1: Exited with exit code 75"
    script = f"trap 'echo {ending} >&2; exit 75' USR2; echo $0 >&2; while :; do sleep 0.05; done"
    for host in ("node2", "node1"):
        for step in launcher.steps:
            step.terminate()
        launcher.steps.clear()
        launcher.start_job_step([0, 1], ["sh", "-c", script, f"srun: error: Node failure on {host}"], [], {})
        wait_until(lambda: tell(launcher) and launcher.steps[0].lost_hosts, "word of the loss")
        assert launcher.leaving == (host == "node1")
    wait_until(lambda: tell(launcher) and launcher.stopped, "the ranks have stopped")
    launcher.coordinator.close()
