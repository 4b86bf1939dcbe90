"""Start a real SLURM cluster on this machine, and execute commands in a checkout on it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from common.runs import provenance
from common.runs.folder import RunFolder
from common.system.processes import Process
from slurm.local_cluster.cluster import Cluster, find_cluster_folder
from slurm.local_cluster.slurm_conf import Plan
from tests.harness.commands.processes import (
    WAIT_TIMEOUT,
    find_processes,
    make_environment,
    select_applicable_settings,
    wait_until,
)
from tests.harness.repository import ROOT

# Prefix of commands with time limits, because other tests run at the same time. Only root may raise the priority.
HIGH_PRIORITY = ("nice", "--adjustment=-8") if os.getuid() == 0 else ()


class Site:
    """A cluster and a checkout on it. Tests may edit the checkout.

    Every command starts with `prefix`, which selects another user or other mounts.
    """

    def __init__(self, folder: Path, cache: Path, prefix: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.cache = cache
        self.prefix = prefix
        self.checkout = folder / "checkout"
        self.runs = folder / "runs"
        self.env = make_environment(CLUSTER_DIR=str(folder), PYTHONPATH=str(self.checkout))
        for name in provenance.list_source_files():
            (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.checkout / name)

    def execute_module(
        self, module: str, *arguments: str, status: int | None = 0, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Execute a module in the checkout and check its exit status, unless `status` is None."""
        # not `cwd`: a process that enters other mounts starts in their root
        change_folder = ("env", f"--chdir={self.checkout}")
        argv = [*self.prefix, *change_folder, sys.executable, "-m", module, *arguments]
        process = subprocess.run(argv, env=self.env | env, capture_output=True, text=True, timeout=300, check=False)
        assert status is None or process.returncode == status, process.stdout + process.stderr
        return process

    def format_settings_option(self, runs: str, *additional: str, name: str = "mnist_pipeline") -> str:
        """Return the option --args of a small run on the digits."""
        settings = ["data.name=digits", "data.test_limit=500"]
        settings += [f"data.cache={self.cache}", f"runs={self.runs / runs}"]
        return "--args=" + " ".join(select_applicable_settings(name, [*settings, *additional]))

    def submit(
        self, name: str, runs: str, *settings: str, options: tuple[str, ...] = ("--nodes=2",), **env: str
    ) -> subprocess.CompletedProcess[str]:
        arguments = (self.format_settings_option(runs, *settings, name=name), *options, "--", name)
        return self.execute_module("slurm", "exp", *arguments, status=None, **env)

    def get_only_run(self, runs: str) -> RunFolder:
        (path,) = (self.runs / runs).iterdir()
        return RunFolder(path)

    def execute_in_cluster(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Execute a program on the controller of the cluster, such as a command of SLURM."""
        return self.execute_module("slurm", "cluster", "exec", *arguments, status=None, **env)

    def wait_for_job(self, job: str, state: str) -> None:
        command = ("squeue", "-h", "-j", job, "-o", "%T")
        wait_on_cluster(f"job {job} is {state}", lambda: state in self.execute_in_cluster(*command).stdout)

    @contextlib.contextmanager
    def occupy_hosts(self) -> Iterator[None]:
        """Occupy all hosts, so that submitted jobs wait until the end of the block."""
        command = ("sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
        job = self.execute_in_cluster(*command).stdout.strip()
        self.wait_for_job(job, "RUNNING")
        try:
            yield
        finally:
            self.execute_in_cluster("scancel", job)

    def wait_for_state(self, folder: RunFolder, state: str, seconds: float = 60) -> str:
        """Wait until `make status` shows a state, and return its output."""
        output = ""

        def shows_state() -> bool:
            nonlocal output
            output = self.execute_module("slurm", "status", str(folder.path), status=None).stdout
            return f"  {state}  " in output

        try:
            wait_on_cluster(f"the run is {state}", shows_state, seconds, pause=0.3)
        except TimeoutError:
            raise AssertionError(output) from None
        return output

    def wait_for_exit(self, folder: RunFolder, seconds: float = 30) -> None:
        """Wait until all processes of a run have exited."""
        wait_on_cluster("all processes have exited", lambda: not find_processes(str(folder.path)), seconds)


@contextlib.contextmanager
def start_cluster(site: Site, *options: str) -> Iterator[Site]:
    """Start the site's cluster, and stop it after the block."""
    site.execute_module("slurm", "cluster", "up", "--nodes", "2", *options)
    try:
        yield site
    finally:
        site.execute_module("slurm", "cluster", "down")
    assert not find_processes(str(site.folder))


@contextlib.contextmanager
def create_mount_namespace(script: str) -> Iterator[tuple[str, ...]]:
    """Execute a shell script as root in a new mount namespace. Yield the prefix of commands in this namespace."""
    argv = ["unshare", "--mount", "sh", "-ec", f"{script}\necho ready\nexec cat"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin
        assert holder.stdout
        assert holder.stdout.readline() == "ready\n"
        yield "nsenter", f"--mount=/proc/{holder.pid}/ns/mnt", "--"
        holder.stdin.close()


def find_running_cluster(environ: Mapping[str, str]) -> Cluster:
    """Return the running cluster that commands with these variables use."""
    folder = find_cluster_folder("local", environ)
    process = Process.load(folder / "holder")
    assert process, "the cluster is not running"
    return Cluster(Plan.load(folder), process)


def wait_on_cluster(
    description: str, condition: Callable[[], Any], seconds: float = WAIT_TIMEOUT, pause: float = 0.1
) -> Any:
    """Wait until a condition holds and return its value. Raises TimeoutError with the description."""
    return wait_until(condition, description, seconds, pause)


@contextlib.contextmanager
def create_shared_folder() -> Iterator[Path]:
    """Create a folder that every user can write, with a short path. Delete it after the block."""
    path = Path(tempfile.mkdtemp(prefix="lab-", dir="/tmp"))
    path.chmod(0o1777)
    try:
        yield path
    finally:
        shutil.rmtree(path)
