"""Experiments on a real SLURM cluster of two hosts, through the commands that a person types."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common import provenance
from common.folder import Folder
from tests.experiments import EXPERIMENTS, Entry
from tests.helpers import ROOT, environment, processes_of, run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
every = pytest.mark.parametrize("entry", EXPERIMENTS, ids=lambda entry: entry.name)
SECRET = "0123456789abcdef" * 2 + "01234567"  # in one piece it would stand in the snapshot of this file


class Site:
    """The cluster and a checkout on it."""

    def __init__(self, folder: Path, cache: Path, checkout: Path) -> None:
        self.folder, self.cache, self.checkout = folder, cache, checkout
        self.runs = folder / "runs"
        self.env = environment(CLUSTER_DIR=str(folder), PYTHONPATH=str(checkout))

    def call(self, module: str, *words: str, status: int | None = 0, **env: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            cwd=self.checkout,
            env=self.env | env,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert status is None or done.returncode == status, done.stdout + done.stderr
        return done

    def settings(self, runs: str, *more: str) -> str:
        words = ["data.name=digits", f"data.cache={self.cache}", f"runs={self.runs / runs}", "data.test_limit=500"]
        return "--args=" + " ".join([*words, *more])

    def submit(
        self, name: str, runs: str, *more: str, options: tuple[str, ...] = ("--nodes=2",), **env: str
    ) -> subprocess.CompletedProcess[str]:
        return self.call("slurm.submit", self.settings(runs, *more), *options, "--", name, status=None, **env)

    def run_of(self, runs: str) -> Folder:
        (path,) = (self.runs / runs).iterdir()
        return Folder(path)

    def inside(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.call("slurm.cluster", "exec", *words, status=None, **env)

    def wait_for_job(self, job: str, state: str) -> None:
        for _ in range(100):
            if state in self.inside("squeue", "-h", "-j", job, "-o", "%T").stdout:
                return
            time.sleep(0.1)
        raise AssertionError(self.inside("scontrol", "show", "job", job).stdout)

    def wait(self, folder: Folder, state: str, seconds: float = 60) -> str:
        """Wait until `make status` shows a state; returns its last words."""
        deadline = time.monotonic() + seconds
        while True:
            shown = self.call("slurm.status", "status", str(folder.path), status=None).stdout
            if f"  {state}  " in shown or time.monotonic() > deadline:
                assert f"  {state}  " in shown, shown
                return shown
            time.sleep(0.3)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Site]:
    """Two hosts, and a copy of the checkout, which tests may edit."""
    folder = tmp_path_factory.mktemp("site")
    checkout = folder / "checkout"
    for name in provenance.source_files():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    found = Site(folder, cache, checkout)
    found.call("slurm.cluster", "up", "--nodes", "2")
    yield found
    found.call("slurm.cluster", "down")
    assert not processes_of(str(folder))


@every
def test_both_hosts_take_part_and_the_numbers_are_those_of_a_local_run(
    site: Site, entry: Entry, tmp_path: Path
) -> None:
    words = (*entry.smallest, "steps=30", "epochs=1")
    done = site.submit(entry.name, f"two-{entry.name}", *words, options=("--nodes=2", "--follow=1"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on the local cluster, 2 nodes, 2 processes" in done.stdout and "test accuracy" in done.stdout
    folder = site.run_of(f"two-{entry.name}")
    meta = json.loads((folder.path / "meta.json").read_text())
    assert meta["world"]["hosts"] == ["node1", "node2"] and meta["world"]["launched_by"] == "slurm"
    assert meta["history"][0]["state"] == "finished" and meta["history"][0]["slurm"]["SLURM_JOB_ID"]
    assert "#SBATCH --nodes=2" in (folder.path / "submit" / "job.sh").read_text()
    assert "FINISHED" in site.call("slurm.status", "status", str(folder.path)).stdout
    assert "test accuracy" in site.call("slurm.status", "logs", str(folder.path)).stdout
    local = run(entry.name, "--config", str(folder.path / "config.yaml"), "launch.threads=1", runs=tmp_path / "local")
    assert local.status == 0, local.err
    assert [row["loss"] for row in folder.metrics() if "loss" in row] == local.losses


def test_two_jobs_at_once_and_cancel(site: Site) -> None:
    for name in ("first", "second"):
        done = site.submit("mnist_pipeline", name, "epochs=500", options=("--nodes=1",))
        assert done.returncode == 0, done.stderr
    folders = [site.run_of(name) for name in ("first", "second")]
    for folder in folders:
        site.wait(folder, "RUNNING")
    for folder in folders:
        assert "cancelled job" in site.call("slurm.status", "cancel", str(folder.path)).stdout
        assert "CANCELLED" in site.call("slurm.status", "status", str(folder.path)).stdout
    deadline = time.monotonic() + 30
    while any(processes_of(str(folder.path)) for folder in folders):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_what_was_submitted_runs_whatever_is_edited_later(site: Site) -> None:
    blocker = site.inside("sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    site.wait_for_job(blocker.stdout.strip(), "RUNNING")
    done = site.submit("mnist_pipeline", "edited", "steps=10")
    assert done.returncode == 0, done.stderr
    files = [site.checkout / "experiments" / "mnist_pipeline.py", site.checkout / "common" / "evaluate.py"]
    texts = [file.read_text() for file in files]
    try:
        for file in files:
            file.write_text("raise RuntimeError('edited after submission')\n")
        folder = site.run_of("edited")
        assert not folder.attempts(), "it waits for the hosts"
        site.inside("scancel", blocker.stdout.strip())
        deadline = time.monotonic() + 60
        while not folder.result and time.monotonic() < deadline:
            time.sleep(0.3)
    finally:
        for file, text in zip(files, texts, strict=True):
            file.write_text(text)
    assert folder.result.get("state") == "finished"


def test_submission_from_inside_an_allocation(site: Site) -> None:
    words = [sys.executable, "-m", "slurm.submit", site.settings("inside", "steps=10"), "--nodes=2", "--follow=1"]
    done = site.inside("salloc", "--nodes=1", "--ntasks=1", *words, "--", "mnist_pipeline")
    assert done.returncode == 0, done.stdout + done.stderr
    assert site.run_of("inside").result["state"] == "finished"


def settings_words(site: Site, runs: str) -> list[str]:
    return site.settings(runs, "steps=10").removeprefix("--args=").split()


def test_srun_starts_the_script(site: Site) -> None:
    script = [sys.executable, "experiments/mnist_pipeline.py", *settings_words(site, "srun")]
    done = site.inside("srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", *script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((site.run_of("srun").path / "meta.json").read_text())["world"]["hosts"] == ["node1", "node2"]


def test_torchrun_inside_an_allocation_goes_first(site: Site) -> None:
    script = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    script += ["--master-port=29511", "experiments/mnist_pipeline.py", *settings_words(site, "torchrun")]
    done = site.inside("srun", "--nodes=1", "--ntasks=1", "--cpus-per-task=2", *script)
    assert done.returncode == 0, done.stdout + done.stderr
    world = json.loads((site.run_of("torchrun").path / "meta.json").read_text())["world"]
    assert world["launched_by"] == "torchrun" and world["processes"] == 2


def test_killed_rank_ends_the_job_that_must_not_be_queued_again(site: Site) -> None:
    assert site.submit("mnist_pipeline", "killed", "epochs=500", "cluster.requeue=false").returncode == 0
    folder = site.run_of("killed")
    site.wait(folder, "RUNNING")
    deadline = time.monotonic() + 60
    while not folder.metrics():
        assert time.monotonic() < deadline
        time.sleep(0.2)
    start = time.monotonic()
    found = site.inside("bash", "-c", f"pgrep -f 'submitit.core._submit {folder.path}'").stdout.split()
    assert found
    os.kill(min(int(pid) for pid in processes_of(str(folder.path)) if is_rank(pid)), 9)
    shown = site.wait(folder, "FAILED", seconds=30)
    assert time.monotonic() - start < 30 and "cluster.requeue=false" in shown
    deadline = time.monotonic() + 20
    while processes_of(str(folder.path)):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def is_rank(pid: int) -> bool:
    """Whether a process is a rank of a job, seen from outside the cluster."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"submitit.core._submit" in words and b"srun" not in words[0]


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        ((), ("--nodes=4",), "cannot be shared evenly"),
        (("stages=3",), ("--nodes=3",), "NODES=3, but the local cluster has 2 hosts"),
        (("cluster.partition=nowhere",), ("--nodes=2",), "has no partition nowhere"),
        ((), ("--nodes=0",), "is no positive number"),
    ],
)
def test_what_the_cluster_cannot_do_is_refused(
    site: Site, words: tuple[str, ...], options: tuple[str, ...], message: str
) -> None:
    start = time.monotonic()
    done = site.submit("mnist_pipeline", "refused", "depth=5", *words, options=options)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert done.stderr.count("error: ") <= 2 and "Traceback" not in done.stderr
    assert time.monotonic() - start < 15
    assert not list((site.runs / "refused").glob("*"))


def test_secrets_stay_in_the_environment(site: Site) -> None:
    done = site.submit(
        "mnist_pipeline",
        "secret",
        "steps=10",
        WANDB_API_KEY=SECRET,
        WANDB_MODE="offline",
        options=("--nodes=2", "--follow=1"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert SECRET not in done.stdout + done.stderr
    for path in site.run_of("secret").path.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_the_doctor_sees_both_hosts(site: Site) -> None:
    done = site.call("slurm.doctor", "--nodes=2")
    assert "node1" in done.stdout and "node2" in done.stdout and "all is sound" in done.stdout
