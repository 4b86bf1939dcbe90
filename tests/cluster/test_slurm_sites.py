"""Runs on other kinds of clusters: that of an ordinary user, and one with real accounting."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm.local_cluster import slurm_conf
from tests.harness.slurm.cluster_site import (
    Site,
    create_mount_namespace,
    create_shared_folder,
    start_cluster,
    wait_on_cluster,
)

pytestmark = pytest.mark.timeout(300)
NOBODY = 65534
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")


# ---- an ordinary user


def find_closed_folder(path: Path) -> Path | None:
    """Return the topmost folder on the way to `path` that ordinary users may not enter."""
    for folder_on_the_way in [*reversed(path.parents), path]:
        if not folder_on_the_way.stat().st_mode & 0o001:
            return folder_on_the_way
    return None


def write_mount_script(paths: list[Path], scratch: Path) -> str:
    """Return a shell script that makes the paths reachable for all users: open folders cover the closed ones."""
    saves = []
    covers = set()
    restores = []
    for index, path in enumerate(dict.fromkeys(paths)):
        closed_folder = find_closed_folder(path)
        if closed_folder:
            saves.append(f"mkdir {scratch}/{index}; mount --bind '{path}' {scratch}/{index}")
            covers.add(f"mount -t tmpfs -o mode=755 cover '{closed_folder}'")
            restores.append(f"mkdir -p '{path}'; mount --bind {scratch}/{index} '{path}'")
    return "\n".join([*saves, *sorted(covers), *restores])


@pytest.mark.skipif(os.getuid() != 0, reason="the other tests ran as an ordinary user already")
def test_an_ordinary_user_trains_on_two_hosts(cache: Path) -> None:
    with create_shared_folder() as base, create_shared_folder() as scratch:
        interpreter = [Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve()]
        with create_mount_namespace(write_mount_script(interpreter, scratch)) as prefix:
            site = Site(base, base / "cache", (*prefix, *AS_NOBODY))
            site.env["HOME"] = str(base)
            shutil.copytree(cache, site.cache)
            site.cache.chmod(0o755)  # pytest's folders belong to one user
            command = [*site.prefix, sys.executable, "-c", "import submitit"]
            process = subprocess.run(command, capture_output=True, text=True, check=False)
            if process.returncode:
                pytest.skip(f"NOT TESTED: an ordinary user cannot run {sys.executable}: {process.stderr[-300:]}")
            with start_cluster(site):
                check_finished_run(site)
                check_cancelled_run(site)


def check_finished_run(site: Site) -> None:
    """Check that a run finishes on two hosts and belongs to the ordinary user."""
    options = ("--nodes=2", "--follow=1")
    process = site.submit("ddp_multinode", "own", "steps=10", "batch=16", options=options)
    assert process.returncode == 0, process.stdout + process.stderr
    run_folder = site.get_only_run("own")
    assert run_folder.result["state"] == "finished"
    assert run_folder.path.stat().st_uid == NOBODY
    meta = json.loads((run_folder.path / "meta.json").read_text())
    assert meta["world"]["hosts"] == ["node1", "node2"]
    assert "FINISHED" in site.execute_module("slurm", "status", str(run_folder.path)).stdout


def check_cancelled_run(site: Site) -> None:
    """Check that a running job can be cancelled."""
    assert site.submit("ddp_multinode", "long", "epochs=500").returncode == 0
    run_folder = site.get_only_run("long")
    site.wait_for_state(run_folder, "RUNNING")
    assert "canceled job" in site.execute_module("slurm", "cancel", str(run_folder.path)).stdout
    site.wait_for_exit(run_folder)


# ---- accounting


@pytest.fixture
def accounting(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Site]:
    if not all(slurm_conf.find_program(name) for name in ("mariadbd", "slurmdbd")):
        pytest.skip("NOT TESTED: MariaDB is not installed (apt-get install mariadb-server slurmdbd)")
    with start_cluster(Site(tmp_path_factory.mktemp("db"), cache), "--db") as site:
        yield site


def restart_controller_without_state(site: Site) -> None:
    """Restart the controller without its saved state."""
    (pid_file,) = site.folder.glob("cluster-*/run/slurmctld.pid")
    pid = pid_file.read_text().strip()
    site.execute_in_cluster("kill", pid)
    wait_on_cluster("the controller has ended", lambda: site.execute_in_cluster("kill", "-0", pid).returncode)
    assert site.execute_in_cluster("slurmctld", "-c").returncode == 0


def is_in_accounting(site: Site, job: str, state: str) -> bool:
    """Return whether the accounting database contains the final state of a job."""
    return site.execute_in_cluster("sacct", "-n", "-X", "-P", "-j", job, "-o", "State").stdout.startswith(state)


def test_accounting_replaces_lost_state_of_the_controller(accounting: Site) -> None:
    site = accounting
    # the shown state, the exit status of `status --wait` and that of `logs --follow`
    outcomes = {"COMPLETED": ("LOST", 1, 1), "FAILED": ("FAILED", 1, 2), "CANCELLED": ("CANCELLED", 0, 1)}
    for name, setting in (("COMPLETED", "steps=5"), ("FAILED", "launch.interface=eth9"), ("CANCELLED", "epochs=500")):
        process = site.submit("mnist_pipeline", name, setting)
        assert process.returncode == 0, process.stderr
        job = json.loads((site.get_only_run(name).path / "meta.json").read_text())["job"]["id"]
        if name == "CANCELLED":
            site.wait_for_state(site.get_only_run(name), "RUNNING")
            site.execute_in_cluster("scancel", job)
        wait_on_cluster(f"sacct shows {name}", functools.partial(is_in_accounting, site, job, name))
        (site.get_only_run(name).path / "result.json").unlink(missing_ok=True)  # it would be read first
    restart_controller_without_state(site)
    for name, (state, status, follow_status) in outcomes.items():
        path = str(site.get_only_run(name).path)
        job = json.loads((site.get_only_run(name).path / "meta.json").read_text())["job"]["id"]
        assert "Invalid job id" in site.execute_in_cluster("scontrol", "show", "job", job).stderr
        output = site.execute_module("slurm", "status", path, "--wait=1", status=status).stdout
        assert f"  {state}  " in output
        assert f"job {job} {name}" in output
        site.execute_module("slurm", "logs", path, "--follow=1", status=follow_status)
