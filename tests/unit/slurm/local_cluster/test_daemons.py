"""What starts the daemons of a local cluster: their processes, environment, ports and complaints."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from common.system.errors import UserError
from slurm.local_cluster import cli, daemons, namespaces
from slurm.local_cluster.slurm_conf import Plan
from tests.harness.fake_slurm import Fake


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    (tmp_path / "run").mkdir()
    return Plan("local", tmp_path, 1, 2, 1000, "me", 0, 0, "munge", False, 5000, {})


def test_a_detached_child_has_nothing_of_its_caller_but_the_socket_that_it_keeps(tmp_path: Path) -> None:
    def open_inheritable() -> int:
        handle = os.open(tmp_path / "secret", os.O_WRONLY | os.O_CREAT)
        os.set_inheritable(handle, True)
        return handle

    lower = open_inheritable()
    ours, theirs = socket.socketpair()
    handles = lower, open_inheritable()

    def be_first() -> None:
        namespaces.detach_process(tmp_path / "log", keep=theirs)
        theirs.send(str(Path.cwd()).encode())
        is_leader = os.getsid(0) == os.getpid()
        leaks = "".join(f"test ! -e /proc/self/fd/{handle} || echo leaked; " for handle in handles)
        os.execvp("sh", ["sh", "-c", f"echo leader {is_leader}; {leaks}"])

    assert namespaces.wait_for_child(namespaces.fork_child(be_first)) == 0
    for handle in handles:
        os.close(handle)
    assert ours.recv(100) == b"/"
    assert (tmp_path / "log").read_text() == "leader True\n"


def test_the_first_process_collects_those_that_ended_before(tmp_path: Path) -> None:
    def be_first() -> None:
        for _ in range(2):
            pid = namespaces.fork_child(lambda: None)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has waited for it
        namespaces.serve_as_init(lambda: False)
        (tmp_path / "children").write_text(Path("/proc/self/task", str(os.getpid()), "children").read_text())

    assert namespaces.wait_for_child(namespaces.fork_child(be_first)) == 0
    assert (tmp_path / "children").read_text() == ""


def test_a_daemon_gets_none_of_the_callers_secrets(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    file = plan.folder / "environment"
    daemons.start_daemon(plan, "sh", "-c", f"env >{file}")
    found = dict(line.split("=", 1) for line in file.read_text().splitlines())
    assert found["SLURM_CONF"] == f"{plan.folder}/slurm.conf" and found["HOME"] == "/"
    assert set(found) <= {"SLURM_CONF", "PATH", "HOME", "LC_ALL", "PWD", "OLDPWD", "SHLVL", "_"}
    with pytest.raises(UserError, match=r"^sh exited with status 3$"):
        daemons.start_daemon(plan, "sh", "-c", "exit 3")


def test_munge_gets_a_key_that_nobody_else_reads(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(plan.folder)
    fake.answer("munged", "true")
    monkeypatch.setenv("PATH", f"{fake.bin}:{os.environ['PATH']}")
    daemons.start_munge(plan)
    run = plan.folder / "run"
    key = (run / "munge.key").stat()
    assert key.st_size == 128 and key.st_mode & 0o777 == 0o400
    assert {f"--key-file={run}/munge.key", f"--socket={run}/munge.sock"} <= set(fake.calls.read_text().split())


def test_a_service_is_waited_for_until_it_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        daemons.wait_for_port("slurmctld", "127.0.0.1", port)
    with pytest.raises(UserError, match=rf"^slurmctld is not listening on port {port} after 0 s$"):
        daemons.wait_for_port("slurmctld", "127.0.0.1", port, seconds=0.1)


@pytest.mark.parametrize(
    ("logs", "complaint"),
    [
        ({}, "the hosts did not become idle in time"),
        ({"ctl": "slurmctld: started\nerror: node1 did not start\n"}, "node1 did not start"),
        ({"ctl": "error: node1 did not start\n", "node1": "slurmd: fatal: no memory\n"}, "no memory"),
        (
            {"ctl": "x: error: Parsing error at unrecognized key: Kilwait\nslurmctld: fatal: bad slurm.conf\n"},
            "Parsing error at unrecognized key: Kilwait",
        ),
    ],
)
def test_what_kept_a_cluster_from_starting_is_found_in_its_logs(
    tmp_path: Path, logs: dict[str, str], complaint: str
) -> None:
    for name, text in logs.items():
        (tmp_path / f"{name}.log").write_text(text)
    assert cli.find_startup_error(tmp_path) == complaint
