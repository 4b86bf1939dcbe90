"""A real SLURM cluster and a checkout on it, for the tests that need them."""

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
from tests.harness.processes import applicable, environment, processes_of, wait_until
from tests.harness.warm import ROOT

# before a command whose time is measured, as other tests go on beside it; only root may ask for that
FIRST = ("nice", "--adjustment=-8") if os.getuid() == 0 else ()


class Site:
    """The cluster and a checkout on it, which tests may edit.

    `prefix` are words before every command: another user, another view of the disks.
    """

    def __init__(self, folder: Path, cache: Path, prefix: tuple[str, ...] = ()) -> None:
        self.folder, self.cache, self.prefix = folder, cache, prefix
        self.checkout, self.runs = folder / "checkout", folder / "runs"
        self.env = environment(CLUSTER_DIR=str(folder), PYTHONPATH=str(self.checkout))
        for name in provenance.list_source_files():
            (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.checkout / name)

    def call(self, module: str, *words: str, status: int | None = 0, **env: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            # not `cwd`: entering other mounts leads back to their root
            [*self.prefix, "env", f"--chdir={self.checkout}", sys.executable, "-m", module, *words],
            env=self.env | env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert status is None or done.returncode == status, done.stdout + done.stderr
        return done

    def settings(self, runs: str, *more: str, name: str = "mnist_pipeline") -> str:
        words = ["data.name=digits", f"data.cache={self.cache}", f"runs={self.runs / runs}", "data.test_limit=500"]
        return "--args=" + " ".join(applicable(name, [*words, *more]))

    def submit(
        self, name: str, runs: str, *more: str, options: tuple[str, ...] = ("--nodes=2",), **env: str
    ) -> subprocess.CompletedProcess[str]:
        return self.call(
            "slurm", "exp", self.settings(runs, *more, name=name), *options, "--", name, status=None, **env
        )

    def run_of(self, runs: str) -> RunFolder:
        (path,) = (self.runs / runs).iterdir()
        return RunFolder(path)

    def inside(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.call("slurm", "cluster", "exec", *words, status=None, **env)

    def wait_for_job(self, job: str, state: str) -> None:
        asked = ("squeue", "-h", "-j", job, "-o", "%T")
        until(f"job {job} is {state}", lambda: state in self.inside(*asked).stdout)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """All hosts are taken: what is submitted waits until the block ends."""
        words = ("sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
        job = self.inside(*words).stdout.strip()
        self.wait_for_job(job, "RUNNING")
        try:
            yield
        finally:
            self.inside("scancel", job)

    def wait(self, folder: RunFolder, state: str, seconds: float = 60) -> str:
        """Wait until `make status` shows a state; returns its last words."""
        shown = ""

        def look() -> bool:
            nonlocal shown
            shown = self.call("slurm", "status", str(folder.path), status=None).stdout
            return f"  {state}  " in shown

        try:
            until(f"it is {state}", look, seconds, pause=0.3)
        except TimeoutError:
            raise AssertionError(shown) from None
        return shown

    def gone(self, folder: RunFolder, seconds: float = 30) -> None:
        """Wait until no process of a run is left."""
        until("no process is left", lambda: not processes_of(str(folder.path)), seconds)


@contextlib.contextmanager
def up(site: Site, *options: str) -> Iterator[Site]:
    """Start the site's cluster, and end it whatever happens."""
    site.call("slurm", "cluster", "up", "--nodes", "2", *options)
    try:
        yield site
    finally:
        site.call("slurm", "cluster", "down")
    assert not processes_of(str(site.folder))


@contextlib.contextmanager
def own_mounts(script: str) -> Iterator[tuple[str, ...]]:
    """Run a shell script as root where its mounts are seen by nobody else; the words that start a program there."""
    words = ["unshare", "--mount", "sh", "-ec", f"{script}\necho ready\nexec cat"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin and holder.stdout and holder.stdout.readline() == "ready\n"
        yield "nsenter", f"--mount=/proc/{holder.pid}/ns/mnt", "--"
        holder.stdin.close()


def find_cluster(environ: Mapping[str, str]) -> Cluster:
    """The cluster that commands in such an environment find."""
    folder = find_cluster_folder("local", environ)
    process = Process.load(folder / "holder")
    assert process, "the cluster is gone"
    return Cluster(Plan.load(folder), process)


def until(what: str, true: Callable[[], Any], seconds: float = 60, pause: float = 0.1) -> Any:
    """Wait for a condition; returns its value. Raises TimeoutError."""
    return wait_until(true, what, seconds, pause)


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder with a short path that every user may write."""
    path = Path(tempfile.mkdtemp(prefix="lab-", dir="/tmp"))
    path.chmod(0o1777)
    try:
        yield path
    finally:
        shutil.rmtree(path)
