"""The local cluster itself: real daemons, real jobs, real faults. Needs slurm-wlm and iproute2."""

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
from tests.harness.site import folder, until
from tests.harness.warm import ROOT

KINDS = ("net", "mnt", "pid", "uts")
FAULTS = ("SlurmdTimeout=5", "KillWait=2", "GraceTime=3", "SlurmctldParameters=preempt_send_user_signal")


class Tool:
    """`python -m slurm cluster` with a state folder of its own."""

    def __init__(self, base: Path, prefix: tuple[str, ...] = (), python: str = sys.executable, root: Path = ROOT):
        self.base, self.prefix, self.python, self.root = base, prefix, python, root

    def argv(self, *words: str) -> list[str]:
        return [*self.prefix, self.python, "-m", "slurm", "cluster", *words]

    @property
    def environ(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
        return kept | {"CLUSTER_DIR": str(self.base), "PYTHONPATH": str(self.root)}

    def __call__(self, *words: str, status: int | None = 0, stdin: str = "") -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.argv(*words),
            cwd=self.root,
            env=self.environ,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert status is None or done.returncode == status, (words, done, self.logs())
        return done

    def out(self, *words: str) -> str:
        return self(*words).stdout.strip()

    def start(self, *words: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(self.argv(*words), cwd=self.root, env=self.environ, stdin=pipe, stdout=pipe, text=True)

    def logs(self) -> str:
        """The end of every daemon's log, for the report of a failure."""
        return "\n".join(f"{log}:\n{log.read_text()[-1500:]}" for log in sorted(self.base.glob("*/log/*.log")))

    def holder(self, name: str = "local") -> int:
        (record,) = self.base.glob(f"cluster-*-{name}/holder")
        return int(record.read_text().split()[0])

    def submit(self, script: str, *options: str) -> str:
        """Submit a batch script; its job id."""
        fixed = ("--parsable", "--output=/dev/null", *options)
        return self("exec", "sbatch", *fixed, stdin=f"#!/bin/bash\n{script}\n").stdout.strip()

    def job(self, number: str) -> str:
        return self.out("exec", "squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T")

    def node(self, number: int) -> str:
        return self.out("exec", "sinfo", "--noheader", f"--nodes=node{number}", "--partition=main", "--format=%T")


@contextlib.contextmanager
def laboratory(*words: str, name: str = "local") -> Iterator[Tool]:
    """A cluster, ended whatever happens."""
    with folder() as base:
        tool = Tool(base)
        try:
            tool("up", "--name", name, *words)
            yield tool
        finally:
            tool("down", "--name", name, status=None)  # a test may have ended it


@pytest.fixture(scope="module")
def tool() -> Iterator[Tool]:
    """The cluster that most tests share."""
    with laboratory(*(word for line in FAULTS for word in ("--conf", line))) as made:
        yield made


def namespaces(pid: int | str) -> set[str]:
    try:
        return {str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for kind in KINDS}
    except OSError:
        return set()


def members(spaces: set[str]) -> list[Process]:
    """The processes in any of the namespaces. Another cluster may get the numbers of namespaces that are gone."""
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if namespaces(entry.name) & spaces]
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            found.append(Process.identify(pid))
    return found


def wait_for_end(processes: list[Process]) -> None:
    until("no process left", lambda: not any(process.is_alive() for process in processes))


def machine() -> tuple[str, list[str], str]:
    """What a cluster must leave alone: mounts, links, host name."""
    links = sorted(path.name for path in Path("/sys/class/net").iterdir())
    return Path("/proc/self/mountinfo").read_text(), links, os.uname().nodename


def test_a_started_cluster_is_idle_at_once_and_leaves_nothing_behind() -> None:
    before, mine = machine(), namespaces("self")
    with folder() as base:
        tool = Tool(base)
        print(tool.out("up"))
        assert [tool.node(1), tool.node(2)] == ["idle", "idle"]
        assert machine() == before  # nor does anything show while it is up
        first = namespaces(tool.holder())
        assert len(first) == len(KINDS) and not first & mine
        # every process that the cluster's own process table shows, and the namespaces of each
        inside = tool.out("exec", "sh", "-c", "for p in /proc/[0-9]*; do readlink $p/ns/*; done").split()
        spaces = {space for space in inside if space.startswith(("net", "mnt", "pid", "uts"))} - mine
        assert len({space for space in spaces if space.startswith("net")}) == 3  # the controller and two hosts
        running = members(spaces)
        assert len(running) > 5
        assert "is already up" in tool.out("up", "--nodes", "2")
        refused = tool("up", "--nodes", "3", status=2).stderr
        assert "is already up with NODES=2; stop it first: make cluster-down" in refused
        began = time.monotonic()
        tool("down")
        print(f"down took {time.monotonic() - began:.2f} s")
        wait_for_end(running)
        assert machine() == before
        assert "is not up" in tool("status", status=2).stderr
        assert "is not up" in tool.out("down")
        assert [path.name for path in base.iterdir()] == [f"cluster-{os.getuid()}-local"]


def test_one_kill_ends_a_cluster_and_its_next_start_is_clean() -> None:
    with laboratory("--nodes", "1") as tool:
        job = tool.submit("sleep 1000")
        until("the job runs", lambda: tool.job(job) == "RUNNING")
        running = members(namespaces(tool.holder()))
        os.kill(tool.holder(), signal.SIGKILL)
        wait_for_end(running)
        assert "is not up" in tool("exec", "true", status=2).stderr
        tool("up", "--nodes", "1")
        assert tool.out("exec", "squeue", "--noheader") == ""
        assert tool.node(1) == "idle"
        assert int(tool.submit("true")) >= int(job) + 900  # an id never comes twice


SEND = """
import socket, sys, time
if sys.argv[1] == "receive":
    with socket.create_server(("0.0.0.0", 7000)) as server:
        print("ready", flush=True)
        taken, _ = server.accept()
        began = time.monotonic()
        while taken.recv(1 << 16):
            pass
        print(time.monotonic() - began)
else:
    with socket.create_connection(("10.77.0.2", 7000)) as taken:
        taken.sendall(bytes(1_000_000))
"""


def test_cables_carry_the_rate_that_was_asked_for() -> None:
    with laboratory("--nodes", "2", "--rate", "20mbit") as tool:
        tool("power-off", "1")
        tool("power-on", "1")
        assert [line.split()[3] for line in tool.out("status").splitlines()[2:]] == ["20mbit"] * 2
        host = tool.out("node", "1", "tc", "qdisc", "show", "dev", "eth0")
        assert "rate 20Mbit" in host, "the other end of the cable"
        receiver = tool.start("node", "2", sys.executable, "-c", SEND, "receive")
        assert receiver.stdout is not None and receiver.stdout.readline() == "ready\n"
        tool("node", "1", sys.executable, "-c", SEND, "send")
        seconds = float(receiver.communicate()[0])
        print(f"1 MB over 20 Mbit/s in {seconds:.3f} s")
        assert seconds > 0.38, "1 MB without what the buckets let through takes at least that long"
        refused = tool("up", "--rate", "10mbit", status=2).stderr
        assert "is already up with NODES=2 and cables 20mbit; stop it first: make cluster-down" in refused
        done = tool("up", "--name", "far", "--delay", "5ms", status=None)
        try:
            if done.returncode:
                assert "DELAY requires the kernel module sch_netem, which is missing" in done.stderr
            else:
                assert "5ms" in tool.out("status", "--name", "far")
        finally:
            tool("down", "--name", "far", status=None)


def test_a_benchmark_slows_both_ends_of_one_hosts_cable() -> None:
    with folder() as base, hosts.local_cluster(base, last=Shape(rate=10e6)):
        tool = Tool(base)
        assert [line.split()[3] for line in tool.out("status").splitlines()[2:]] == ["-", "-", "-", "10mbit"]
        assert "rate 10Mbit" in tool.out("node", "4", "tc", "qdisc", "show", "dev", "eth0")
        assert "tbf" not in tool.out("node", "3", "tc", "qdisc", "show", "dev", "eth0")


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
assert time.monotonic() - began < 15, "waits for DNS, which gives up after 20 s"
"""


def test_a_cluster_ends_when_its_folder_is_deleted() -> None:
    with folder() as base:
        tool = Tool(base)
        tool("up", "--nodes", "1")
        running = members(namespaces(tool.holder()))
        shutil.rmtree(base / f"cluster-{os.getuid()}-local")
        wait_for_end(running)


def test_a_clusters_mounts_stay_inside_where_the_machine_shares_mounts() -> None:
    if os.getuid():
        pytest.skip("an ordinary user's mounts cannot reach the machine")
    with folder() as base:
        tool = Tool(base, ("unshare", "--mount", "--propagation=shared"))
        look = "cat /proc/self/mountinfo"
        call = f"{sys.executable} -m slurm cluster"
        argv = ["sh", "-c", f"{look} > {base}/1; {call} up; {look} > {base}/2; {call} down"]
        subprocess.run([*tool.prefix, *argv], cwd=ROOT, env=tool.environ, timeout=60, check=True)
        assert (base / "1").read_text() == (base / "2").read_text() != ""


def test_two_hosts_have_their_own_names_and_addresses(tool: Tool) -> None:
    rows = sorted(tool.out("exec", "srun", "--nodes=2", "--ntasks=2", sys.executable, "-c", NAMES).splitlines())
    assert [row.split()[:5] for row in rows] == [
        ["node1", "10.77.0.1", "node1", "10.77.0.1", str(ROOT)],
        ["node2", "10.77.0.2", "node2", "10.77.0.1", str(ROOT)],
    ]
    assert {row.split()[5] for row in rows} == {"0", "1"}


def test_commands_run_as_the_caller_where_the_caller_is(tool: Tool) -> None:
    assert tool("exec", "sh", "-c", "exit 7", status=7).stdout == ""
    assert tool("exec", "cat", stdin="through").stdout == "through"
    assert tool.out("exec", "sh", "-c", "id -u; hostname; pwd").split() == [str(os.getuid()), "ctl", str(ROOT)]
    assert tool.out("node", "2", "hostname") == tool.out("node", "node2", "hostname") == "node2"
    assert tool("node", "2", "sh", "-c", "exit 3", status=3)
    assert tool("shell", stdin="sinfo --noheader --format=%R; hostname; exit 5\n", status=5).stdout.split() == [
        "main",
        "high",
        "ctl",
    ]
    assert "10.77.0.2" in tool.out("status")
    assert tool("cut", "3", status=2).stderr == "error: N must be an integer from 1 to 2 (got '3')\n"


def test_programs_find_the_cluster_that_is_up(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER_DIR", str(tool.base))
    found = cluster.find_running_cluster()
    assert found and cluster.find_running_cluster("other") is None
    argv = found.build_command(["sh", "-c", "hostname; echo $SLURM_CONF; pwd"], cwd="/usr")
    text = subprocess.check_output(argv, text=True, timeout=20)
    assert text.split() == ["ctl", found.plan.environment["SLURM_CONF"], "/usr"]


def test_batch_jobs_and_arrays_show_in_the_sacct_stand_in(tool: Tool) -> None:
    asked = ("exec", "sacct", "-o", "JobID,State,NodeList", "--parsable2", "-j")
    good, bad = tool.submit("true"), tool.submit("exit 3", "--nodelist=node2")
    array = tool.submit("exit $((SLURM_ARRAY_TASK_ID - 1))", "--array=1-2")
    until("jobs end", lambda: tool.out("exec", "squeue", "--noheader") == "")
    rows = [line.split("|") for line in tool.out(*asked, good, "-j", bad, "-j", array).splitlines()]
    assert rows[0] == ["JobID", "State", "NodeList"]
    states = {row[0]: row[1] for row in rows[1:]}
    assert states == {good: "COMPLETED", bad: "FAILED", f"{array}_1": "COMPLETED", f"{array}_2": "FAILED"}
    assert [row[2] for row in rows if row[0] == bad] == ["node2"]
    assert tool.out(*asked, "1") == "JobID|State|NodeList"


def test_a_requeued_job_starts_again(tool: Tool, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    job = tool.submit(f'echo start$SLURM_RESTART_COUNT >> {starts}; [ -n "$SLURM_RESTART_COUNT" ] || sleep 100')
    until("first start", starts.exists)
    tool("requeue", job)
    until("second start", lambda: starts.read_text().split() == ["start", "start1"])
    until("end", lambda: tool.job(job) == "COMPLETED")
    assert "Invalid job id" in tool("requeue", "1", status=2).stderr


def test_preemption_gives_notice_and_starts_the_job_again(tool: Tool, tmp_path: Path) -> None:
    events = tmp_path / "events"
    script = (
        f'echo start$SLURM_RESTART_COUNT >> {events}; [ -z "$SLURM_RESTART_COUNT" ] || exit 0\n'
        f"trap 'echo notice >> {events}' USR2; while :; do sleep 0.1; done"
    )
    job = tool.submit(script, "--signal=B:USR2@1", "--time=10", "--nodelist=node2")
    other = tool.submit("sleep 1000", "--nodelist=node1")
    until("both run", lambda: tool.job(job) == tool.job(other) == "RUNNING" and events.exists())
    assert tool.out("preempt", job).endswith(" requests node2")
    until("notice and second start", lambda: events.read_text().split() == ["start", "notice", "start1"])
    assert tool.job(other) == "RUNNING"  # only the host of the job was asked for
    assert tool.out("preempt").endswith(" requests node[1-2]")
    until("the other is put back", lambda: tool.job(other) == "PENDING")
    tool("exec", "scancel", other)
    until("the queue is empty", lambda: tool.out("exec", "squeue", "--noheader") == "")
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


def test_a_cut_host_lives_on_and_one_without_power_falls_silent(tool: Tool, tmp_path: Path) -> None:
    beats = tmp_path / "beats"
    tool("node", "1", "sh", "-c", f"(while :; do echo x >> {beats}; sleep 0.1; done) >/dev/null 2>&1 &")
    server = tool.start("node", "2", sys.executable, "-c", LISTEN)
    assert server.stdout and server.stdout.readline() == "listening\n"
    client = tool.start("exec", sys.executable, "-c", CONNECT)
    assert client.stdout and client.stdout.readline() == "connected\n"
    tool("cut", "1")
    tool("power-off", "2")
    assert client.communicate(timeout=10)[0] == "silence\n"  # a dying process would have closed its connection
    server.wait(timeout=5)
    table = [line.split() for line in tool.out("status").splitlines()[2:]]
    assert [row[2] for row in table] == ["cut", "off"]
    for verb in ("power-off", "cut", "join"):
        assert "power-on 2" in tool(verb, "2", status=2).stderr
    assert "is already on" in tool("power-on", "1", status=2).stderr

    size = beats.stat().st_size
    until("hosts are down", lambda: tool.node(1) == tool.node(2) == "down*")
    assert beats.stat().st_size > size  # the cut host still works and still writes

    tool("join", "1")
    tool("power-on", "2")
    tool("exec", "scontrol", "update", "nodename=node1", "state=resume", status=None)  # it may have come back by itself
    until("hosts are idle", lambda: tool.node(1) == tool.node(2) == "idle")
    names = tool.out("exec", "srun", "--nodes=2", "hostname").split()
    assert sorted(names) == ["node1", "node2"]


def test_two_clusters_do_not_see_each_other(tool: Tool) -> None:
    with laboratory("--nodes", "1", name="other") as second:
        config = second.out("exec", "--name", "other", "scontrol", "show", "config")
        assert "ClusterName             = other" in config
        job = tool.submit("sleep 2")
        argv = ("exec", "--name", "other", "squeue", "--noheader", f"--jobs={job}")
        assert "Invalid job id" in second(*argv, status=None).stderr
        assert second.out("exec", "--name", "other", "srun", "hostname") == "node1"
    assert len(tool.out("exec", "srun", "--nodes=2", "hostname").split()) == 2


def test_a_mistake_in_slurm_conf_is_told_and_no_process_stays() -> None:
    with folder() as base:
        tool = Tool(base)
        done = tool("up", "--conf", "NoSuchKey=1", status=2)
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "NoSuchKey" in done.stderr
        assert not list(base.glob("*/holder"))


def test_jobs_run_under_munge() -> None:
    if not shutil.which("munged", path=f"{os.environ['PATH']}:/usr/sbin"):
        pytest.skip("NOT TESTED: munge is not installed (apt-get install munge)")
    with laboratory("--auth", "munge") as tool:
        assert len(tool.out("exec", "srun", "--nodes=2", "hostname").split()) == 2


def test_sacct_tells_from_a_private_database() -> None:
    path = f"{os.environ['PATH']}:/usr/sbin"
    if not all(shutil.which(name, path=path) for name in ("mariadbd", "slurmdbd")):
        pytest.skip("NOT TESTED: MariaDB is not installed (apt-get install mariadb-server slurmdbd)")
    began = time.monotonic()
    with laboratory("--nodes", "1", "--db") as tool:
        print(f"up with a database took {time.monotonic() - began:.1f} s")
        job = tool.submit("exit 3")
        asked = ("sacct", "--noheader", "--allocations", "--parsable2", "--format=JobID,State,ExitCode", "-j", job)
        until("sacct tells", lambda: tool.out("exec", *asked) == f"{job}|FAILED|3:0")
        assert tool.out("node", "1", *asked) == f"{job}|FAILED|3:0"


def test_an_ordinary_user_starts_a_cluster_without_root() -> None:
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin")
    if os.getuid():
        pytest.skip("the other tests ran as an ordinary user already")
    if not python or b"True" not in subprocess.check_output(
        [python, "-c", "import sys; print(sys.version_info >= (3, 11))"]
    ):
        pytest.skip("NOT TESTED: no Python 3.11 that an ordinary user may run")
    prefix = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    with folder() as base, folder() as code:
        for package in ("slurm", "common"):  # the checkout may lie where nobody else may read
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
            assert [line.split()[2] for line in tool.out("status").splitlines()[2:]] == ["cut", "in"]
            running = members(namespaces(tool.holder()))
        finally:
            tool("down")
        wait_for_end(running)
