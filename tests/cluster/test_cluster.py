"""The local cluster itself: real daemons, jobs and faults. Requires slurm-wlm and iproute2."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.system.processes import Process
from slurm.local_cluster import cluster
from slurm.local_cluster.cables import Shape
from tests.benchmarks import hosts
from tests.harness.repository import ROOT
from tests.harness.slurm.cluster_site import create_shared_folder, wait_on_cluster

NAMESPACE_KINDS = ("net", "mnt", "pid", "uts")
USE_TWO_SECONDS = "import time\nwhile time.process_time() < 2: pass"
FAST_FAULTS = ("SlurmdTimeout=5", "KillWait=2", "GraceTime=3", "SlurmctldParameters=preempt_send_user_signal")


class Tool:
    """`python -m slurm cluster` with a state folder of its own."""

    def __init__(self, base: Path, prefix: tuple[str, ...] = (), python: str = sys.executable, root: Path = ROOT):
        self.base = base
        self.prefix = prefix
        self.python = python
        self.root = root

    def argv(self, *arguments: str) -> list[str]:
        return [*self.prefix, self.python, "-m", "slurm", "cluster", *arguments]

    @property
    def environ(self) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        return inherited | {"CLUSTER_DIR": str(self.base), "PYTHONPATH": str(self.root)}

    def __call__(self, *arguments: str, status: int | None = 0, stdin: str = "") -> subprocess.CompletedProcess[str]:
        process = subprocess.run(
            self.argv(*arguments),
            cwd=self.root,
            env=self.environ,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert status is None or process.returncode == status, (arguments, process, self.logs())
        return process

    def out(self, *arguments: str) -> str:
        return self(*arguments).stdout.strip()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self.argv(*arguments), cwd=self.root, env=self.environ, stdin=pipe, stdout=pipe, text=True
        )

    def logs(self) -> str:
        """Return the end of every daemon's log, for the report of a failure."""
        return "\n".join(f"{log}:\n{log.read_text()[-1500:]}" for log in sorted(self.base.glob("*/log/*.log")))

    def holder(self, name: str = "local") -> int:
        (record,) = self.base.glob(f"cluster-*-{name}/holder")
        return int(record.read_text().split()[0])

    def submit(self, script: str, *options: str) -> str:
        """Submit a batch script; return its job id."""
        options = ("--parsable", "--output=/dev/null", *options)
        return self("exec", "sbatch", *options, stdin=f"#!/bin/bash\n{script}\n").stdout.strip()

    def read_job_state(self, job: str) -> str:
        return self.out("exec", "squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")

    def wait_for_empty_queue(self) -> None:
        wait_on_cluster("the queue is empty", lambda: self.out("exec", "squeue", "--noheader") == "")

    def list_job_hosts(self) -> list[str]:
        """Return the host names that a job on two hosts prints."""
        return sorted(self.out("exec", "srun", "--nodes=2", "hostname").split())

    def read_status_column(self, index: int, *options: str) -> list[str]:
        """Return a column of the hosts' table that `status` prints."""
        return [line.split()[index] for line in self.out("status", *options).splitlines()[2:]]

    def read_node_state(self, number: int) -> str:
        return self.out("exec", "sinfo", "--noheader", f"--nodes=node{number}", "--partition=main", "--format=%T")


@contextlib.contextmanager
def laboratory(*arguments: str, name: str = "local") -> Iterator[Tool]:
    """Start a cluster, and stop it also after a failure."""
    with create_shared_folder() as base:
        tool = Tool(base)
        try:
            tool("up", "--name", name, *arguments)
            yield tool
        finally:
            tool("down", "--name", name, status=None)  # a test may have stopped it


@pytest.fixture(scope="module")
def tool() -> Iterator[Tool]:
    """The cluster that most tests share."""
    with laboratory(*(f"--conf={line}" for line in FAST_FAULTS)) as shared_tool:
        yield shared_tool


def read_namespaces(pid: int | str) -> set[str]:
    try:
        return {str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for kind in NAMESPACE_KINDS}
    except OSError:
        return set()


def list_members(namespaces: set[str]) -> list[Process]:
    """Return the processes in any of the namespaces, whose numbers a later cluster may get."""
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if read_namespaces(entry.name) & namespaces]
    processes = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            processes.append(Process.identify(pid))
    return processes


def wait_for_end(processes: list[Process]) -> None:
    wait_on_cluster("no process left", lambda: not any(process.is_alive() for process in processes))


def read_machine_state() -> tuple[str, list[str], str]:
    """Return what a cluster must not change: mounts, links, host name."""
    links = sorted(path.name for path in Path("/sys/class/net").iterdir())
    return Path("/proc/self/mountinfo").read_text(), links, os.uname().nodename


def test_a_started_cluster_is_idle_at_once_and_leaves_nothing_behind() -> None:
    machine_state = read_machine_state()
    test_namespaces = read_namespaces("self")
    with create_shared_folder() as base:
        tool = Tool(base)
        print(tool.out("up"))
        assert [tool.read_node_state(1), tool.read_node_state(2)] == ["idle", "idle"]
        assert read_machine_state() == machine_state
        holder_namespaces = read_namespaces(tool.holder())
        assert len(holder_namespaces) == len(NAMESPACE_KINDS)
        assert not holder_namespaces & test_namespaces
        # the namespaces of every process in the cluster's own process table
        inside = tool.out("exec", "sh", "-c", "for p in /proc/[0-9]*; do readlink $p/ns/*; done").split()
        namespaces = {namespace for namespace in inside if namespace.startswith(NAMESPACE_KINDS)} - test_namespaces
        assert sum(namespace.startswith("net") for namespace in namespaces) == 3  # the controller and two hosts
        running = list_members(namespaces)
        assert len(running) > 5
        assert "is already up" in tool.out("up", "--nodes", "2")
        refused = tool("up", "--nodes", "3", status=2).stderr
        assert "is already up with NODES=2; stop it first: make cluster-down" in refused
        start_time = time.monotonic()
        tool("down")
        print(f"down took {time.monotonic() - start_time:.2f} s")
        wait_for_end(running)
        assert read_machine_state() == machine_state
        assert "is not up" in tool("status", status=2).stderr
        assert "is not up" in tool.out("down")
        (cluster_folder,) = base.iterdir()
        assert cluster_folder.name == f"cluster-{os.getuid()}-local"


def test_one_kill_ends_a_cluster_and_its_next_start_is_clean() -> None:
    with laboratory("--nodes", "1") as tool:
        job = tool.submit("sleep 1000")
        wait_on_cluster("the job runs", lambda: tool.read_job_state(job) == "RUNNING")
        running = list_members(read_namespaces(tool.holder()))
        os.kill(tool.holder(), signal.SIGKILL)
        wait_for_end(running)
        assert "is not up" in tool("exec", "true", status=2).stderr
        tool("up", "--nodes", "1")
        assert tool.out("exec", "squeue", "--noheader") == ""
        assert tool.read_node_state(1) == "idle"
        assert int(tool.submit("true")) >= int(job) + 900  # job ids are unique


SEND = """
import socket, sys, time
if sys.argv[1] == "receive":
    with socket.create_server(("0.0.0.0", 7000)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        start_time = time.monotonic()
        while connection.recv(1 << 16):
            pass
        print(time.monotonic() - start_time)
else:
    with socket.create_connection(("10.77.0.2", 7000)) as connection:
        connection.sendall(bytes(1_000_000))
"""


def test_cables_carry_the_requested_rate() -> None:
    with laboratory("--nodes", "2", "--rate", "20mbit") as tool:
        tool("power-off", "1")
        tool("power-on", "1")
        assert tool.read_status_column(3) == ["20mbit"] * 2
        host = tool.out("node", "1", "tc", "qdisc", "show", "dev", "eth0")
        assert "rate 20Mbit" in host, "the other end of the cable"
        receiver = tool.start("node", "2", sys.executable, "-c", SEND, "receive")
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        tool("node", "1", sys.executable, "-c", SEND, "send")
        seconds = float(receiver.communicate()[0])
        print(f"1 MB over 20 Mbit/s in {seconds:.3f} s")
        assert seconds > 0.38, "1 MB minus the bucket sizes takes at least this long"
        refused = tool("up", "--rate", "10mbit", status=2).stderr
        assert "is already up with NODES=2 and cables 20mbit; stop it first: make cluster-down" in refused
        process = tool("up", "--name", "far", "--delay", "5ms", status=None)
        try:
            if process.returncode:
                assert "DELAY requires the kernel module sch_netem, which is missing" in process.stderr
            else:
                assert "5ms" in tool.out("status", "--name", "far")
        finally:
            tool("down", "--name", "far", status=None)


@pytest.fixture(scope="module")
def benchmark_cluster() -> Iterator[tuple[Tool, hosts.BenchmarkCluster]]:
    """A cluster of a benchmark, of which the last host has a slow cable."""
    with create_shared_folder() as base, hosts.local_cluster(base, last=Shape(rate=10e6)) as running:
        yield Tool(base), running


def test_a_benchmark_slows_both_ends_of_one_hosts_cable(
    benchmark_cluster: tuple[Tool, hosts.BenchmarkCluster],
) -> None:
    tool, _ = benchmark_cluster
    assert tool.read_status_column(3) == ["-", "-", "-", "10mbit"]
    assert "rate 10Mbit" in tool.out("node", "4", "tc", "qdisc", "show", "dev", "eth0")
    assert "tbf" not in tool.out("node", "3", "tc", "qdisc", "show", "dev", "eth0")


def test_the_processor_time_of_an_ended_job_counts_for_the_benchmark(
    benchmark_cluster: tuple[Tool, hosts.BenchmarkCluster],
) -> None:
    tool, running = benchmark_cluster
    before = running.measure_load()
    tool.submit(f"exec {sys.executable} -c '{USE_TWO_SECONDS}'", "--wait")
    seconds = running.measure_load().family - before.family
    assert seconds > 1.9  # two seconds, at the resolution of /proc


NAMES = """
import os, socket, time
name = socket.gethostname()
began = time.monotonic()
address = socket.gethostbyname(name)
back, peer = socket.gethostbyaddr(address)[0], socket.gethostbyname("node1")
print(name, address, back, peer, os.getcwd(), os.environ["SLURM_PROCID"])
try:
    socket.getaddrinfo("no.such.name", 80)
except OSError:
    pass
assert time.monotonic() - began < 15, "the look-up waits for DNS, which times out after 20 s"
"""


def test_a_cluster_ends_when_its_folder_is_deleted() -> None:
    with create_shared_folder() as base:
        tool = Tool(base)
        tool("up", "--nodes", "1")
        running = list_members(read_namespaces(tool.holder()))
        shutil.rmtree(base / f"cluster-{os.getuid()}-local")
        wait_for_end(running)


def test_mounts_of_a_cluster_stay_inside_if_the_machine_shares_mounts() -> None:
    if os.getuid():
        pytest.skip("an ordinary user's mounts cannot reach the machine")
    with create_shared_folder() as base:
        tool = Tool(base, ("unshare", "--mount", "--propagation=shared"))
        list_mounts = "cat /proc/self/mountinfo"
        call = f"{sys.executable} -m slurm cluster"
        script = f"{list_mounts} > {base}/before; {call} up; {list_mounts} > {base}/after; {call} down"
        subprocess.run([*tool.prefix, "sh", "-c", script], cwd=ROOT, env=tool.environ, timeout=60, check=True)
        mounts = (base / "before").read_text()
        assert mounts
        assert (base / "after").read_text() == mounts


def test_two_hosts_have_their_own_names_and_addresses(tool: Tool) -> None:
    rows = sorted(tool.out("exec", "srun", "--nodes=2", "--ntasks=2", sys.executable, "-c", NAMES).splitlines())
    assert [row.split()[:5] for row in rows] == [
        ["node1", "10.77.0.1", "node1", "10.77.0.1", str(ROOT)],
        ["node2", "10.77.0.2", "node2", "10.77.0.1", str(ROOT)],
    ]
    assert {row.split()[5] for row in rows} == {"0", "1"}


def test_commands_run_as_the_caller_in_the_callers_folder(tool: Tool) -> None:
    assert tool("exec", "sh", "-c", "exit 7", status=7).stdout == ""
    assert tool("exec", "cat", stdin="through").stdout == "through"
    assert tool.out("exec", "sh", "-c", "id -u; hostname; pwd").split() == [str(os.getuid()), "ctl", str(ROOT)]
    assert tool.out("node", "2", "hostname") == tool.out("node", "node2", "hostname") == "node2"
    assert tool("node", "2", "sh", "-c", "exit 3", status=3)
    shell = tool("shell", stdin="sinfo --noheader --format=%R; hostname; exit 5\n", status=5)
    assert shell.stdout.split() == ["main", "high", "ctl"]
    assert "10.77.0.2" in tool.out("status")
    assert tool("cut", "3", status=2).stderr == "error: N must be an integer from 1 to 2 (got '3')\n"


def test_programs_find_the_running_cluster(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER_DIR", str(tool.base))
    running_cluster = cluster.find_running_cluster()
    assert running_cluster
    assert cluster.find_running_cluster("other") is None
    argv = running_cluster.build_command(["sh", "-c", "hostname; echo $SLURM_CONF; pwd"], cwd="/usr")
    text = subprocess.check_output(argv, text=True, timeout=20)
    assert text.split() == ["ctl", running_cluster.plan.environment["SLURM_CONF"], "/usr"]


def test_batch_jobs_and_arrays_show_in_the_sacct_stand_in(tool: Tool) -> None:
    sacct = ("exec", "sacct", "-o", "JobID,State,NodeList", "--parsable2", "-j")
    good = tool.submit("true")
    bad = tool.submit("exit 3", "--nodelist=node2")
    array = tool.submit("exit $((SLURM_ARRAY_TASK_ID - 1))", "--array=1-2")
    tool.wait_for_empty_queue()
    rows = [line.split("|") for line in tool.out(*sacct, good, "-j", bad, "-j", array).splitlines()]
    assert rows[0] == ["JobID", "State", "NodeList"]
    states = {row[0]: row[1] for row in rows[1:]}
    assert states == {good: "COMPLETED", bad: "FAILED", f"{array}_1": "COMPLETED", f"{array}_2": "FAILED"}
    assert [row[2] for row in rows if row[0] == bad] == ["node2"]
    assert tool.out(*sacct, "1") == "JobID|State|NodeList"


def test_a_requeued_job_starts_again(tool: Tool, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    job = tool.submit(f'echo start$SLURM_RESTART_COUNT >> {starts}; [ -n "$SLURM_RESTART_COUNT" ] || sleep 100')
    wait_on_cluster("first start", starts.exists)
    tool("requeue", job)
    wait_on_cluster("second start", lambda: starts.read_text().split() == ["start", "start1"])
    wait_on_cluster("end", lambda: tool.read_job_state(job) == "COMPLETED")
    assert "Invalid job id" in tool("requeue", "1", status=2).stderr


def test_preemption_gives_notice_and_starts_the_job_again(tool: Tool, tmp_path: Path) -> None:
    events = tmp_path / "events"
    script = (
        f'echo start$SLURM_RESTART_COUNT >> {events}; [ -z "$SLURM_RESTART_COUNT" ] || exit 0\n'
        f"trap 'echo notice >> {events}' USR2; while :; do sleep 0.1; done"
    )
    job = tool.submit(script, "--signal=B:USR2@1", "--time=10", "--nodelist=node2")
    other = tool.submit("sleep 1000", "--nodelist=node1")
    wait_on_cluster("both jobs run", lambda: tool.read_job_state(job) == tool.read_job_state(other) == "RUNNING")
    wait_on_cluster("the job has begun", events.exists)
    assert tool.out("preempt", job).endswith(" requests node2")
    wait_on_cluster("notice and second start", lambda: events.read_text().split() == ["start", "notice", "start1"])
    assert tool.read_job_state(other) == "RUNNING"  # only the host of the preempted job was requested
    assert tool.out("preempt").endswith(" requests node[1-2]")
    wait_on_cluster("the other job is requeued", lambda: tool.read_job_state(other) == "PENDING")
    tool("exec", "scancel", other)
    tool.wait_for_empty_queue()
    assert "Invalid job id" in tool("preempt", "1", status=2).stderr


LISTEN = """
import socket
with socket.create_server(("", 5000)) as server:
    print("listening", flush=True)
    peer = server.accept()[0]
    peer.recv(1)
"""
CONNECT = """
import socket
peer = socket.create_connection(("node2", 5000), timeout=5)
print("connected", flush=True)
peer.settimeout(4)
try:
    print("goodbye" if peer.recv(1) == b"" else "data")
except TimeoutError:
    print("silence")
except OSError as error:
    print(error)
"""


def test_a_cut_host_keeps_working_and_a_host_without_power_falls_silent(tool: Tool, tmp_path: Path) -> None:
    beats = tmp_path / "beats"
    tool("node", "1", "sh", "-c", f"(while :; do echo x >> {beats}; sleep 0.1; done) >/dev/null 2>&1 &")
    server = tool.start("node", "2", sys.executable, "-c", LISTEN)
    assert server.stdout
    assert server.stdout.readline() == "listening\n"
    client = tool.start("exec", sys.executable, "-c", CONNECT)
    assert client.stdout
    assert client.stdout.readline() == "connected\n"
    tool("cut", "1")
    tool("power-off", "2")
    assert client.communicate(timeout=10)[0] == "silence\n"  # a dying process would have closed its connection
    server.wait(timeout=5)
    assert tool.read_status_column(2) == ["cut", "off"]
    for verb in ("power-off", "cut", "join"):
        assert "power-on 2" in tool(verb, "2", status=2).stderr
    assert "is already on" in tool("power-on", "1", status=2).stderr

    size = beats.stat().st_size
    wait_on_cluster("hosts are down", lambda: tool.read_node_state(1) == tool.read_node_state(2) == "down*")
    assert beats.stat().st_size > size  # the cut host still works and writes

    tool("join", "1")
    tool("power-on", "2")
    tool("exec", "scontrol", "update", "nodename=node1", "state=resume", status=None)  # SLURM may use it already
    wait_on_cluster("hosts are idle", lambda: tool.read_node_state(1) == tool.read_node_state(2) == "idle")
    assert tool.list_job_hosts() == ["node1", "node2"]


def test_two_clusters_do_not_see_each_other(tool: Tool) -> None:
    with laboratory("--nodes", "1", name="other") as second:
        config = second.out("exec", "--name", "other", "scontrol", "show", "config")
        assert "ClusterName             = other" in config
        job = tool.submit("sleep 2")
        argv = ("exec", "--name", "other", "squeue", "--noheader", f"--jobs={job}")
        assert "Invalid job id" in second(*argv, status=None).stderr
        assert second.out("exec", "--name", "other", "srun", "hostname") == "node1"
    assert len(tool.list_job_hosts()) == 2


def test_a_mistake_in_slurm_conf_is_reported_and_no_process_is_left() -> None:
    with create_shared_folder() as base:
        tool = Tool(base)
        message = tool("up", "--conf", "NoSuchKey=1", status=2).stderr
        assert message.startswith("error: ")
        assert message.count("\n") == 1
        assert "NoSuchKey" in message
        assert not list(base.glob("*/holder"))


def test_jobs_run_under_munge() -> None:
    if not shutil.which("munged", path=f"{os.environ['PATH']}:/usr/sbin"):
        pytest.skip("NOT TESTED: munge is not installed (apt-get install munge)")
    with laboratory("--auth", "munge") as tool:
        assert len(tool.list_job_hosts()) == 2


def test_sacct_reads_a_private_database() -> None:
    path = f"{os.environ['PATH']}:/usr/sbin"
    if not all(shutil.which(name, path=path) for name in ("mariadbd", "slurmdbd")):
        pytest.skip("NOT TESTED: MariaDB is not installed (apt-get install mariadb-server slurmdbd)")
    start_time = time.monotonic()
    with laboratory("--nodes", "1", "--db") as tool:
        print(f"up with a database took {time.monotonic() - start_time:.1f} s")
        job = tool.submit("exit 3")
        sacct = ("sacct", "--noheader", "--allocations", "--parsable2", "--format=JobID,State,ExitCode", "-j", job)
        wait_on_cluster("sacct shows the job", lambda: tool.out("exec", *sacct) == f"{job}|FAILED|3:0")
        assert tool.out("node", "1", *sacct) == f"{job}|FAILED|3:0"


def test_an_ordinary_user_starts_a_cluster_without_root() -> None:
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin")
    if os.getuid():
        pytest.skip("the other tests ran as an ordinary user already")
    version_check = "import sys; print(sys.version_info >= (3, 11))"
    if not python or b"True" not in subprocess.check_output([python, "-c", version_check]):
        pytest.skip("NOT TESTED: no Python 3.11 that an ordinary user may run")
    prefix = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    with create_shared_folder() as base, create_shared_folder() as code:
        for package in ("slurm", "common"):  # other users may be unable to read the checkout
            shutil.copytree(ROOT / package, code / package, ignore=shutil.ignore_patterns("__pycache__"))
        code.chmod(0o755)
        tool = Tool(base, prefix, python, code)
        try:
            print(tool.out("up"))
            rows = tool.out("exec", "srun", "--nodes=2", "sh", "-c", 'id -u; getent hosts "$(hostname)"').split()
            assert sorted(rows) == ["10.77.0.1", "10.77.0.2", "65534", "65534", "node1", "node2"]
            assert tool.out("node", "2", "id", "-u") == "65534"
            tool("cut", "1")
            tool("power-off", "2")
            tool("power-on", "2")
            assert tool.read_status_column(2) == ["cut", "in"]
            running = list_members(read_namespaces(tool.holder()))
        finally:
            tool("down")
        wait_for_end(running)
