"""Daemons of a local cluster: their environment, keys and ports."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from common.system.errors import UserError
from slurm.local_cluster import daemons
from slurm.local_cluster.slurm_conf import Plan
from tests.harness.slurm.fake_slurm import FakeSlurm


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    (tmp_path / "run").mkdir()
    return Plan("local", tmp_path, 1, 2, 1000, "me", 0, 0, "munge", False, 5000, {})


def test_a_daemon_inherits_no_secrets(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    file = plan.folder / "environment"
    daemons.start_daemon(plan, "sh", "-c", f"env >{file}")
    variables = dict(line.split("=", 1) for line in file.read_text().splitlines())
    assert variables["SLURM_CONF"] == f"{plan.folder}/slurm.conf"
    assert variables["HOME"] == "/"
    assert set(variables) <= {"SLURM_CONF", "PATH", "HOME", "LC_ALL", "PWD", "OLDPWD", "SHLVL", "_"}


def test_a_daemon_that_does_not_start_is_reported(plan: Plan) -> None:
    with pytest.raises(UserError, match=r"^sh exited with status 3$"):
        daemons.start_daemon(plan, "sh", "-c", "exit 3")


def test_only_its_owner_can_read_the_key_of_munge(plan: Plan, fake_here: FakeSlurm) -> None:
    fake_here.define_command("munged", "true")
    daemons.start_munge(plan)
    folder = plan.folder / "run"
    key = (folder / "munge.key").stat()
    assert key.st_size == 128
    assert key.st_mode & 0o777 == 0o400
    arguments = fake_here.calls_file.read_text().split()
    assert {f"--key-file={folder}/munge.key", f"--socket={folder}/munge.sock"} <= set(arguments)


def test_the_port_of_a_service_is_polled_until_it_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        daemons.wait_for_port("slurmctld", "127.0.0.1", port)
    with pytest.raises(UserError, match=rf"^slurmctld is not listening on port {port} after 0 s$"):
        daemons.wait_for_port("slurmctld", "127.0.0.1", port, seconds=0.1)
