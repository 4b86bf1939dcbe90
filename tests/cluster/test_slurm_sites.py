"""Runs on clusters unlike the usual one: an ordinary user's, and one with real accounting."""

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
from tests.harness.site import Site, folder, own_mounts, until, up

pytestmark = pytest.mark.timeout(300)
NOBODY = 65534
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")


# ---- an ordinary user


def closed_above(path: Path) -> Path | None:
    """The topmost folder on the way to `path` that ordinary users may not enter."""
    return next((above for above in [*reversed(path.parents), path] if not above.stat().st_mode & 0o001), None)


def opened(paths: list[Path], scratch: Path) -> str:
    """A shell script that makes the paths reachable for everybody: an open folder covers the closed one above."""
    hidden = {path: above for path in paths if (above := closed_above(path))}
    kept = [f"mkdir {scratch}/{i}; mount --bind '{path}' {scratch}/{i}" for i, path in enumerate(hidden)]
    covers = [f"mount -t tmpfs -o mode=755 cover '{above}'" for above in sorted(set(hidden.values()))]
    shown = [f"mkdir -p '{path}'; mount --bind {scratch}/{i} '{path}'" for i, path in enumerate(hidden)]
    return "\n".join([*kept, *covers, *shown])


@pytest.mark.skipif(os.getuid() != 0, reason="the other tests ran as an ordinary user already")
def test_an_ordinary_user_trains_on_two_hosts(cache: Path) -> None:
    with folder() as base, folder() as scratch:
        interpreter = [Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve()]
        with own_mounts(opened(interpreter, scratch)) as prefix:
            site = Site(base, base / "cache", (*prefix, *AS_NOBODY))
            site.env["HOME"] = str(base)
            shutil.copytree(cache, site.cache)
            site.cache.chmod(0o755)  # pytest's folders are for one user alone
            trial = [*site.prefix, sys.executable, "-c", "import submitit"]
            tried = subprocess.run(trial, capture_output=True, text=True, check=False)
            if tried.returncode:
                pytest.skip(f"NOT TESTED: an ordinary user cannot run {sys.executable}: {tried.stderr[-300:]}")
            with up(site):
                words = ("steps=10", "batch=16")
                done = site.submit("ddp_multinode", "own", *words, options=("--nodes=2", "--follow=1"))
                assert done.returncode == 0, done.stdout + done.stderr
                found = site.run_of("own")
                assert found.result["state"] == "finished" and found.path.stat().st_uid == NOBODY
                meta = json.loads((found.path / "meta.json").read_text())
                assert meta["world"]["hosts"] == ["node1", "node2"]
                assert "FINISHED" in site.call("slurm", "status", str(found.path)).stdout
                assert site.submit("ddp_multinode", "long", "epochs=500").returncode == 0
                site.wait(site.run_of("long"), "RUNNING")
                assert "canceled job" in site.call("slurm", "cancel", str(site.run_of("long").path)).stdout
                site.gone(site.run_of("long"))


# ---- accounting


@pytest.fixture
def accounting(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Site]:
    if not all(slurm_conf.find_program(name) for name in ("mariadbd", "slurmdbd")):
        pytest.skip("NOT TESTED: MariaDB is not installed (apt-get install mariadb-server slurmdbd)")
    with up(Site(tmp_path_factory.mktemp("db"), cache), "--db") as site:
        yield site


def forget(site: Site) -> None:
    """Start the controller anew without what it remembered."""
    (pid_file,) = site.folder.glob("cluster-*/run/slurmctld.pid")
    pid = pid_file.read_text().strip()
    site.inside("kill", pid)
    until("the controller has ended", lambda: site.inside("kill", "-0", pid).returncode)
    assert site.inside("slurmctld", "-c").returncode == 0


def accounted(site: Site, job: str, state: str) -> bool:
    """Whether the accounting database knows how a job has ended."""
    return site.inside("sacct", "-n", "-X", "-P", "-j", job, "-o", "State").stdout.startswith(state)


def test_accounting_knows_what_the_controller_has_forgotten(accounting: Site) -> None:
    site = accounting
    ends = {"COMPLETED": ("LOST", 1, 1), "FAILED": ("FAILED", 1, 2), "CANCELLED": ("CANCELLED", 0, 1)}
    for name, words in (("COMPLETED", "steps=5"), ("FAILED", "launch.interface=eth9"), ("CANCELLED", "epochs=500")):
        done = site.submit("mnist_pipeline", name, words)
        assert done.returncode == 0, done.stderr
        job = json.loads((site.run_of(name).path / "meta.json").read_text())["job"]["id"]
        if name == "CANCELLED":
            site.wait(site.run_of(name), "RUNNING")
            site.inside("scancel", job)
        until(f"sacct tells {name}", functools.partial(accounted, site, job, name))
        (site.run_of(name).path / "result.json").unlink(missing_ok=True)  # it would be asked first
    forget(site)
    for name, (state, status, followed) in ends.items():
        path = str(site.run_of(name).path)
        job = json.loads((site.run_of(name).path / "meta.json").read_text())["job"]["id"]
        assert "Invalid job id" in site.inside("scontrol", "show", "job", job).stderr
        shown = site.call("slurm", "status", path, "--wait=1", status=status).stdout
        assert f"  {state}  " in shown and f"job {job} {name}" in shown, shown
        site.call("slurm", "logs", path, "--follow=1", status=followed)
