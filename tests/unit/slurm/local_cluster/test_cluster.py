"""Access to a local cluster: its folder, and commands inside it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from common.system.errors import UserError
from common.system.processes import Process
from slurm.local_cluster import cluster
from tests.unit.slurm.local_cluster.cluster_command import PLAN

FOREIGN_USER = 12345


@pytest.mark.parametrize("name", ["A", "1a", "a b", "../x", "a-b", "a" * 40, "$(id)"])
def test_invalid_cluster_names_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="starting with a letter"):
        cluster.find_cluster_folder(name)


def test_the_environment_determines_the_folder() -> None:
    name = f"cluster-{os.getuid()}-local"
    assert cluster.find_cluster_folder("local", {}) == Path("/tmp", name)
    assert cluster.find_cluster_folder("local", {"XDG_RUNTIME_DIR": "/run/user/7"}) == Path("/run/user/7", name)
    assert cluster.find_cluster_folder("local", {"XDG_RUNTIME_DIR": "/x", "CLUSTER_DIR": "/y"}) == Path("/y", name)


def test_a_cluster_of_another_user_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start_cluster() -> None:
        folder = cluster.find_cluster_folder("local")
        folder.mkdir()
        replace(PLAN, folder=folder).save()
        Process.identify(os.getpid()).save(folder / "holder")

    monkeypatch.setenv("CLUSTER_DIR", str(tmp_path))
    start_cluster()
    assert cluster.require_running_cluster("local").process.pid == os.getpid()

    monkeypatch.setattr(os, "getuid", lambda: FOREIGN_USER)
    start_cluster()  # another user can create a folder with the name that this user's cluster would have
    assert cluster.find_running_cluster("local") is None
    with pytest.raises(UserError, match=r"cluster local is not up; start it with: make cluster-up"):
        cluster.require_running_cluster("local")


def test_no_cluster_is_up_below_a_folder_that_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CLUSTER_DIR", str(tmp_path / "file"))
    assert cluster.find_running_cluster("local") is None


def test_commands_of_root_enter_the_cluster_without_a_user_namespace() -> None:
    plan = replace(PLAN, uid=0, gid=0)
    command = cluster.Cluster(plan, Process(4711, 1)).build_command(["id"], cwd="/x")
    assert command[:2] == ["nsenter", "--target=4711"]
    assert "--user" not in command
    assert command[-1] == "id"


def test_commands_of_a_user_keep_the_users_identity() -> None:
    command = cluster.Cluster(PLAN, Process(4711, 1)).build_command(["id"], cwd="/x")
    assert "--preserve-credentials" in command
    assert {"--map-user=1000", "--map-group=100", "--chdir=/x", "SLURM_CONF=/tmp/c/slurm.conf"} <= set(command)
