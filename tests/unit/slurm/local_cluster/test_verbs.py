"""Verbs of a local cluster, with scripts for SLURM's commands and for those of the network.

Its hosts are processes in the namespaces of the test, so that entering them needs no rights.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.system.processes import Process
from slurm.local_cluster import cluster, slurm_conf
from slurm.local_cluster.slurm_conf import Plan
from tests.harness import inside, warm
from tests.harness.fake_slurm import Fake
from tests.harness.warm import ROOT

LINKS = [
    {"ifname": "switch", "flags": ["UP"]},
    {"ifname": "node1", "flags": ["UP"], "link_netnsid": 0},
    {"ifname": "node2", "flags": [], "link_netnsid": 1},
]
QDISCS = [{"kind": "tbf", "dev": "node2", "options": {"rate": 25_000_000}}]


class Up:
    """A cluster of three hosts, of which the third one has no power."""

    def __init__(self, folder: Path) -> None:
        self.fake = Fake(folder)
        self.fake.answer("nsenter", 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"')
        self.fake.answer(
            "ip", f"test \"$1\" = -json && echo '{json.dumps(LINKS)}' || {{ cat; echo; }} >>{self.fake.calls}"
        )
        self.fake.answer("tc", f"echo '{json.dumps(QDISCS)}'")
        self.hosts = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
        self.variables = self.fake.environment(CLUSTER_DIR=str(folder))
        self.variables.pop("SLURM_CONF")
        self.folder = cluster.find_cluster_folder("local", self.variables)
        for name in slurm_conf.FOLDERS:
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        Plan("local", self.folder, 3, 2, 1000, "me", 0, 0, "none", False, 5000, {}).save()
        for record, process in zip(("holder", "hosts/node1", "hosts/node2"), self.hosts, strict=True):
            Process.identify(process.pid).save(self.folder / record)

    def tool(self, *words: str, status: int = 0) -> str:
        """A verb, as a process of its own; what it says."""
        argv = [sys.executable, "-m", "slurm", "cluster", *words]
        done = warm.execute(argv, env=self.variables, timeout=60)
        assert done.returncode == status, done.stdout + done.stderr
        return (done.stderr if status else done.stdout).strip()

    def asked(self, name: str) -> list[str]:
        """How a command was called."""
        return [line for line in self.fake.calls.read_text().splitlines() if line.startswith(f"{name} ")]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    made = Up(tmp_path)
    yield made
    for host in made.hosts:
        host.kill()
        host.wait()


def test_the_status_names_cable_and_state_of_each_host(up: Up) -> None:
    up.fake.answer("sinfo", "printf 'node1 idle\\nnode2 down*\\n'")
    head, *rows = up.tool("status").splitlines()
    assert head == f"cluster local is up: first process {up.hosts[0].pid}, files in {up.folder}"
    assert [row.split() for row in rows] == [
        ["HOST", "ADDRESS", "CABLE", "RATE", "SLURM"],
        ["node1", "10.77.0.1", "in", "-", "idle"],
        ["node2", "10.77.0.2", "cut", "200mbit", "down*"],
        ["node3", "10.77.0.3", "off", "-", "unknown"],
    ]


def test_cables_and_power_are_those_of_the_host_that_is_named(up: Up) -> None:
    assert up.tool("cut", "2") == "cut: node2"
    assert up.tool("join", "node2") == "join: node2"
    assert up.tool("power-off", "1") == "power-off: node1"
    changes = [line for line in up.fake.calls.read_text().splitlines() if line.startswith("link ")]
    assert changes == ["link set node2 down", "link set node2 up", "link set node1 down", "link del node1"]
    assert up.hosts[1].wait(timeout=5) == -9 and up.hosts[2].poll() is None
    remedy = "start it with python -m slurm cluster power-on 3"
    assert up.tool("cut", "3", status=2) == f"error: node3 is powered off; {remedy}"
    assert up.tool("power-on", "2", status=2) == "error: node2 is already on"
    assert "N must be an integer from 1 to 3 (got '4')" in up.tool("cut", "4", status=2)
    up.fake.answer("ip", "echo 'Cannot find device \"node2\"' >&2; exit 1")
    assert 'ip: Cannot find device "node2" (link set node2 down)' in up.tool("cut", "2", status=2)


def test_commands_run_on_the_controller_or_on_a_host_that_is_on(up: Up) -> None:
    variable = 'echo "$SLURM_CONF"'
    assert up.tool("exec", "--", "sh", "-c", variable) == f"{up.folder}/slurm.conf"
    assert len(up.asked("nsenter")) == 1
    assert up.tool("node", "2", "sh", "-c", variable) == f"{up.folder}/slurm.conf"
    targets = [line.split()[1] for line in up.asked("nsenter")[1:]]
    assert targets == [f"--target={process.pid}" for process in (up.hosts[0], up.hosts[2])]
    assert "node3 is powered off" in up.tool("node", "3", "true", status=2)
    assert up.tool("exec", status=2) == "error: exec: the command is missing; run, for example, exec sinfo"


def test_a_preemption_asks_for_the_hosts_of_the_job_or_for_all(up: Up) -> None:
    up.fake.answer("sinfo", "printf 'node1\\nnode2'")
    up.fake.answer("squeue", "echo node2")
    up.fake.answer("scontrol", "echo $3 | tr , '\\n'")
    up.fake.answer("sbatch", "echo 4712")
    assert up.tool("preempt", "4711") == "job 4712 in partition high requests node2"
    assert up.tool("preempt") == "job 4712 in partition high requests node1,node2"
    one, both = up.asked("sbatch")
    assert "--nodes=1 --nodelist=node2 " in one and "--nodes=2 --nodelist=node1,node2 " in both
    for name in ("squeue", "sinfo"):
        up.fake.answer(name, "true")
    assert up.tool("preempt", "4711", status=2) == "error: job 4711 is not running"
    assert up.tool("preempt", status=2) == "error: no host is ready to run a job"


def test_a_requeue_passes_on_what_slurm_says(up: Up) -> None:
    assert up.tool("requeue", "4711") == ""
    assert up.asked("scontrol") == ["scontrol requeue 4711"]
    up.fake.answer("scontrol", "echo 'slurm_requeue error: Invalid job id specified' >&2; exit 1")
    assert up.tool("requeue", "1", status=2) == "error: scontrol: Invalid job id specified"


@pytest.fixture
def any_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pytest's paths may be longer than those that SLURM takes."""
    monkeypatch.setattr(slurm_conf, "check_cluster_folder", lambda folder: folder)


@pytest.mark.usefixtures("any_folder")
def test_a_cluster_that_is_up_stays_as_it_is(up: Up) -> None:
    for names in slurm_conf.PACKAGES.values():
        for name in set(names) - {"ip"}:
            up.fake.answer(name, "exit 1")
    asked = ("cluster", "up", "--auth=none")
    variables = {"CLUSTER_DIR": str(up.folder.parent), "PATH": up.variables["PATH"]}
    for words in ((), ("--nodes=3",)):
        done = inside.run_verb(*asked, *words, cwd=ROOT, **variables)
        assert (done.returncode, done.stdout) == (0, "cluster local is already up\n"), done.stderr
    done = inside.run_verb(*asked, "--nodes=2", cwd=ROOT, **variables)
    assert done.stderr == "error: cluster local is already up with NODES=3; stop it first: make cluster-down\n"
    assert done.returncode == 2
    assert up.hosts[0].poll() is None


@pytest.mark.usefixtures("any_folder")
def test_the_end_of_a_cluster_leaves_its_logs_alone(up: Up) -> None:
    (up.folder / "log" / "ctl.log").write_text("it began\n")
    done = inside.run_verb("cluster", "down", CLUSTER_DIR=str(up.folder.parent))
    assert done.stdout == f"cluster local is down; the logs are in {up.folder}/log\n", done.stderr
    assert up.hosts[0].wait(timeout=5) == -9
    assert sorted(path.name for path in up.folder.iterdir() if path.is_dir()) == ["log"]
    assert "cluster local is not up" in up.tool("status", status=2)
