"""`python -m slurm cluster`, with scripts instead of the commands of SLURM and of the network.

The hosts of the cluster are processes in the namespaces of the test, so that entering them needs no rights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.system.errors import UserError
from common.system.processes import Process
from slurm.local_cluster import cli, cluster, slurm_conf
from slurm.local_cluster.slurm_conf import Plan
from tests.harness.commands import execution, in_process_calls
from tests.harness.commands.exit_status import Completed
from tests.harness.commands.processes import WAIT_TIMEOUT
from tests.harness.commands.programs import list_loaded_modules
from tests.harness.repository import ROOT
from tests.harness.slurm.fake_slurm import FakeSlurm
from tests.unit.slurm.local_cluster.cluster_command import run_cluster_command

LINKS = [
    {"ifname": "switch", "flags": ["UP"]},
    {"ifname": "node1", "flags": ["UP"], "link_netnsid": 0},
    {"ifname": "node2", "flags": [], "link_netnsid": 1},
]
QDISCS = [{"kind": "tbf", "dev": "node2", "options": {"rate": 25_000_000}}]
KILLED = -9


class RunningCluster:
    """A cluster of three hosts; the third one is powered off."""

    def __init__(self, fake: FakeSlurm, folder: Path) -> None:
        self.fake = fake
        list_links = f"echo '{json.dumps(LINKS)}'"
        record_changes = f"{{ cat; echo; }} >>{fake.calls_file}"
        fake.define_command("nsenter", 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"')
        fake.define_command("ip", f'test "$1" = -json && {list_links} || {record_changes}')
        fake.define_command("tc", f"echo '{json.dumps(QDISCS)}'")
        self.variables = fake.make_environment(CLUSTER_DIR=str(folder))
        self.variables.pop("SLURM_CONF")
        self.folder = cluster.find_cluster_folder("local", self.variables)
        for name in slurm_conf.FOLDERS:
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        Plan("local", self.folder, 3, 2, 1000, "me", 0, 0, "none", False, 5000, {}).save()
        self.first_process = self.start_process("holder")
        self.node1 = self.start_process("hosts/node1")
        self.node2 = self.start_process("hosts/node2")

    def start_process(self, record: str) -> subprocess.Popen[bytes]:
        """Start the process of a host, and record its pid."""
        process = subprocess.Popen(["sleep", "60"])
        Process.identify(process.pid).save(self.folder / record)
        return process

    def stop(self) -> None:
        """End the processes that still run."""
        for process in (self.first_process, self.node1, self.node2):
            process.kill()
            process.wait()

    def run(self, *arguments: str, status: int = 0) -> str:
        """Run a verb in its own process and return its output, or its error output if it must fail."""
        command = [sys.executable, "-m", "slurm", "cluster", *arguments]
        process = execution.execute_command(command, env=self.variables, timeout=WAIT_TIMEOUT, status=status)
        return (process.stderr if status else process.stdout).strip()

    def list_calls(self, name: str) -> list[str]:
        """Return the recorded calls of a command."""
        return [line for line in self.fake.calls_file.read_text().splitlines() if line.startswith(f"{name} ")]


@pytest.fixture
def running(fake: FakeSlurm, tmp_path: Path) -> Iterator[RunningCluster]:
    local_cluster = RunningCluster(fake, tmp_path)
    yield local_cluster
    local_cluster.stop()


@pytest.fixture
def any_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept pytest's folders, whose paths may be too long for SLURM."""
    monkeypatch.setattr(slurm_conf, "check_cluster_folder", lambda folder: folder)


def test_the_status_shows_cable_and_state_of_each_host(running: RunningCluster) -> None:
    running.fake.define_command("sinfo", "printf 'node1 idle\\nnode2 down*\\n'")
    first_line, *rows = running.run("status").splitlines()
    assert first_line == f"cluster local is up: first process {running.first_process.pid}, files in {running.folder}"
    assert [" ".join(row.split()) for row in rows] == [
        "HOST ADDRESS CABLE RATE SLURM",
        "node1 10.77.0.1 in - idle",
        "node2 10.77.0.2 cut 200mbit down*",
        "node3 10.77.0.3 off - unknown",
    ]


def test_verbs_change_the_cable_and_power_of_one_host(running: RunningCluster) -> None:
    assert running.run("cut", "2") == "cut: node2"
    assert running.run("join", "node2") == "join: node2"
    assert running.run("power-off", "1") == "power-off: node1"
    calls = ["link set node2 down", "link set node2 up", "link set node1 down", "link del node1"]
    assert running.list_calls("link") == calls
    assert running.node1.wait(timeout=WAIT_TIMEOUT) == KILLED
    assert running.node2.poll() is None


def test_changes_that_are_impossible_are_refused(running: RunningCluster) -> None:
    remedy = "start it with python -m slurm cluster power-on 3"
    assert running.run("cut", "3", status=2) == f"error: node3 is powered off; {remedy}"
    assert running.run("power-on", "2", status=2) == "error: node2 is already on"
    assert "N must be an integer from 1 to 3 (got '4')" in running.run("cut", "4", status=2)
    running.fake.define_command("ip", "echo 'Cannot find device \"node2\"' >&2; exit 1")
    assert 'ip: Cannot find device "node2" (link set node2 down)' in running.run("cut", "2", status=2)


def test_commands_run_on_the_controller_or_on_a_running_host(running: RunningCluster) -> None:
    print_variable = ("sh", "-c", 'echo "$SLURM_CONF"')
    assert running.run("exec", "--", *print_variable) == f"{running.folder}/slurm.conf"
    assert len(running.list_calls("nsenter")) == 1
    assert running.run("node", "2", *print_variable) == f"{running.folder}/slurm.conf"
    targets = [line.split()[1] for line in running.list_calls("nsenter")[1:]]
    assert targets == [f"--target={running.first_process.pid}", f"--target={running.node2.pid}"]
    assert "node3 is powered off" in running.run("node", "3", "true", status=2)
    assert running.run("exec", status=2) == "error: exec: the command is missing; run, for example, exec sinfo"


def test_preempt_requests_the_hosts_of_a_job_or_all_hosts(running: RunningCluster) -> None:
    running.fake.define_command("sinfo", "printf 'node1\\nnode2'")
    running.fake.define_command("squeue", "echo node2")
    running.fake.define_command("scontrol", "echo $3 | tr , '\\n'")
    running.fake.define_command("sbatch", "echo 4712")
    assert running.run("preempt", "4711") == "job 4712 in partition high requests node2"
    assert running.run("preempt") == "job 4712 in partition high requests node1,node2"
    for_job, for_all = running.list_calls("sbatch")
    assert "--nodes=1 --nodelist=node2 " in for_job
    assert "--nodes=2 --nodelist=node1,node2 " in for_all


def test_preempt_is_refused_if_there_is_nothing_to_preempt(running: RunningCluster) -> None:
    running.fake.define_command("squeue", "true")
    running.fake.define_command("sinfo", "true")
    assert running.run("preempt", "4711", status=2) == "error: job 4711 is not running"
    assert running.run("preempt", status=2) == "error: no host is ready to run a job"


def test_requeue_forwards_the_error_of_slurm(running: RunningCluster) -> None:
    assert running.run("requeue", "4711") == ""
    assert running.list_calls("scontrol") == ["scontrol requeue 4711"]
    running.fake.define_command("scontrol", "echo 'slurm_requeue error: Invalid job id specified' >&2; exit 1")
    assert running.run("requeue", "1", status=2) == "error: scontrol: Invalid job id specified"


@pytest.mark.usefixtures("any_folder")
def test_up_does_not_change_a_running_cluster(running: RunningCluster) -> None:
    for names in slurm_conf.PACKAGES.values():
        for name in set(names) - {"ip"}:
            running.fake.define_command(name, "exit 1")
    variables = {"CLUSTER_DIR": str(running.folder.parent), "PATH": running.variables["PATH"]}

    def run_up(*options: str, status: int = 0) -> Completed:
        return in_process_calls.call_verb(
            "cluster", "up", "--auth=none", *options, cwd=ROOT, status=status, **variables
        )

    for options in ((), ("--nodes=3",)):
        assert run_up(*options).stdout == "cluster local is already up\n"
    process = run_up("--nodes=2", status=2)
    assert process.stderr == "error: cluster local is already up with NODES=3; stop it first: make cluster-down\n"
    for option, text in (("--cpus=7", "--cpus=7"), ("--db=1", "DB=1"), ("--conf=KillWait=5", "--conf=KillWait=5")):
        message = f"is already up without {text}; stop it first: make cluster-down"
        assert message in run_up(option, status=2).stderr
    assert running.first_process.poll() is None


@pytest.mark.usefixtures("any_folder")
def test_down_stops_the_cluster_and_keeps_its_logs(running: RunningCluster) -> None:
    (running.folder / "log" / "ctl.log").write_text("it began\n")
    process = in_process_calls.call_verb("cluster", "down", CLUSTER_DIR=str(running.folder.parent))
    assert process.stdout == f"cluster local is down; the logs are in {running.folder}/log\n", process.stderr
    assert running.first_process.wait(timeout=WAIT_TIMEOUT) == KILLED
    assert sorted(path.name for path in running.folder.iterdir() if path.is_dir()) == ["log"]
    assert "cluster local is not up" in running.run("status", status=2)


@pytest.mark.parametrize(
    "arguments",
    [["status"], ["shell"], ["exec", "true"], ["node", "1", "true"], ["cut", "1"], ["preempt"], ["requeue", "1"]],
)
def test_verbs_that_need_a_cluster_explain_how_to_start_one(arguments: list[str], tmp_path: Path) -> None:
    process = run_cluster_command(*arguments, CLUSTER_DIR=str(tmp_path), status=2)
    assert process.stderr.startswith("error: cluster local is not up")
    assert "make cluster-up" in process.stderr
    assert process.stderr.count("\n") == 1


def test_down_succeeds_without_a_cluster(tmp_path: Path) -> None:
    process = run_cluster_command("down", CLUSTER_DIR=str(tmp_path))
    assert "is not up" in process.stdout
    assert not any(tmp_path.iterdir())


def test_down_with_an_unknown_name_is_refused(tmp_path: Path) -> None:
    process = run_cluster_command("down", "--name=nosuch", CLUSTER_DIR=str(tmp_path), status=2)
    assert process.stderr == "error: cluster nosuch is not up; no cluster is up\n"
    assert not any(tmp_path.iterdir())


def test_a_cluster_cannot_be_started_inside_another_one(tmp_path: Path) -> None:
    conf = f"{tmp_path}/cluster-{os.getuid()}-local/slurm.conf"
    process = run_cluster_command("up", CLUSTER_DIR=str(tmp_path), SLURM_CONF=conf, status=2)
    assert "inside cluster local" in process.stderr


def test_the_command_imports_no_large_packages() -> None:
    large_packages = ["torch", "numpy", "omegaconf", "yaml", "submitit", "wandb"]
    assert list_loaded_modules("slurm.local_cluster.cli", large_packages) == []


@pytest.mark.usefixtures("any_folder")
def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER_DIR", str(tmp_path))
    target = tmp_path / "elsewhere"
    target.mkdir()
    cluster.find_cluster_folder("local").symlink_to(target)
    with pytest.raises(UserError, match="another user"), cli.lock_cluster_folder("local"):
        pass
    assert not any(target.iterdir())


ERRORS_IN_LOGS = [
    ({}, "the hosts did not become idle in time"),
    ({"ctl": "slurmctld: started\nerror: node1 did not start\n"}, "node1 did not start"),
    ({"ctl": "error: node1 did not start\n", "node1": "slurmd: fatal: no memory\n"}, "no memory"),
    (
        {"ctl": "x: error: Parsing error at unrecognized key: Kilwait\nslurmctld: fatal: bad slurm.conf\n"},
        "Parsing error at unrecognized key: Kilwait",
    ),
]


@pytest.mark.parametrize("logs, error", ERRORS_IN_LOGS)
def test_an_error_in_the_logs_explains_a_failed_start(logs: dict[str, str], error: str, tmp_path: Path) -> None:
    for name, text in logs.items():
        (tmp_path / f"{name}.log").write_text(text)
    assert cli.find_startup_error(tmp_path) == error
