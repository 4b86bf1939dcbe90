"""Mistakes and misfortunes on a real cluster: one clear message in time, the right status, no process left."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from common.runs.folder import RunFolder
from common.system.processes import Process
from slurm.local_cluster import cluster, daemons, namespaces, slurm_conf
from tests.harness.site import FIRST, Site, own_mounts, up

pytestmark = pytest.mark.timeout(300)
SECONDS = 90  # less than any time-out of a message: nobody has waited for somebody who had left


def check(done: subprocess.CompletedProcess[str], message: str) -> None:
    """One error, of this text, and no traceback."""
    said = done.stdout + done.stderr
    assert message in said and "Traceback" not in said, said
    assert sum(line.startswith("error: ") for line in said.splitlines()) <= 1, said


def check_job(
    site: Site, done: subprocess.CompletedProcess[str], folder: RunFolder, message: str, status: int = 2
) -> None:
    """A followed job that failed: why is told to the one who follows and by `make status`, and all is over."""
    check(done, message)
    assert done.returncode == status, done.stdout + done.stderr
    logs = [log.read_text() for log in folder.path.glob("submit/*_log.out")]
    assert not any("Traceback" in text for text in logs), logs
    assert message in site.call("slurm", "status", str(folder.path)).stdout
    site.gone(folder)


def check_in_time(site: Site, folder: RunFolder) -> None:
    """From the job's start until why it failed was written down."""
    job = next(folder.path.glob("submit/*_0_log.out")).name.partition("_")[0]
    fields = site.inside("scontrol", "-o", "show", "job", job, SLURM_TIME_FORMAT="%s").stdout.split()
    (start,) = [float(field.partition("=")[2]) for field in fields if field.startswith("StartTime=")]
    assert (folder.path / "result.json").stat().st_mtime - start < SECONDS


def follow(site: Site, runs: str, *words: str) -> subprocess.CompletedProcess[str]:
    return site.submit("ddp_multinode", runs, "steps=10", *words, options=("--nodes=2", "--follow=1"))


# ---- names and interfaces


@contextlib.contextmanager
def host_knows(site: Site, number: int, names: str) -> Iterator[None]:
    """Replace what one host of the cluster knows of names; the other host and this machine go on as they were."""
    file = site.folder / "hosts"
    file.write_text(f"127.0.0.1 localhost\n10.77.0.254 ctl\n{names}\n")
    environ = {"CLUSTER_DIR": str(site.folder)}
    process = Process.load(cluster.find_cluster_folder("local", environ) / "holder")
    assert process
    plan = slurm_conf.Plan.load(cluster.find_cluster_folder("local", environ))

    def on_host(*argv: str) -> None:
        def body() -> None:
            namespaces.enter_namespaces(int(daemons.locate_host_process_record(plan, number).read_text().split()[0]))
            subprocess.run(argv, check=True)

        assert namespaces.run_in_namespaces(process, body) == 0

    on_host("mount", "--bind", str(file), "/etc/hosts")
    try:
        yield
    finally:
        on_host("umount", "/etc/hosts")


@pytest.mark.parametrize(
    ("number", "names", "message"),
    [
        (2, "10.77.0.2 node2", "node2 cannot reach rank 0 on node1 (address ?, interface none, ports "),
        (1, "127.0.1.1 node1\n10.77.0.2 node2", "resolves to 127.0.1.1, which other hosts cannot reach"),
    ],
    ids=["the other host", "loopback"],
)
def test_a_master_whose_name_leads_nowhere_is_told_in_time(site: Site, number: int, names: str, message: str) -> None:
    runs = f"name-{number}-{len(names)}"
    with host_knows(site, number, names):
        done = follow(site, runs)
    check_job(site, done, site.run_of(runs), message)
    check_in_time(site, site.run_of(runs))


def test_an_interface_that_is_not_there_is_told_in_time(site: Site) -> None:
    done = follow(site, "interface", "launch.interface=eth9")
    check_job(site, done, site.run_of("interface"), "launch.interface=eth9 does not exist on node")
    check_in_time(site, site.run_of("interface"))
    assert "use one of: lo (127.0.0.1), eth0 (10.77.0." in done.stdout


# ---- data


def test_data_that_vanish_between_submission_and_start_are_told_in_time(site: Site) -> None:
    images, prepared = site.folder / "images", site.folder / "prepared"
    for part in ("train", "val"):
        for label, colour in enumerate(("red", "blue")):
            (images / part / colour).mkdir(parents=True)
            for number in range(4 - label):
                Image.new("RGB", (9, 9), colour).save(images / part / colour / f"{number}.png")
    words = ("data.name=imagefolder", f"data.root={images}", f"data.cache={prepared}", "batch=4", "optim.base_batch=4")
    with site.busy():
        submitted = site.submit("ddp_multinode", "vanished", "steps=10", *words)
        assert submitted.returncode == 0, submitted.stderr
        shutil.rmtree(images)
        shutil.rmtree(prepared)
    folder = site.run_of("vanished")
    done = site.call("slurm", "logs", str(folder.path), "--follow=1", status=None)
    check_job(site, done, folder, f"{images}/train is missing; set data.root to a folder with train/<class>/*")
    check_in_time(site, folder)


def test_srun_by_hand_without_data_is_refused_in_time(site: Site) -> None:
    words = [*site.settings("by-hand").removeprefix("--args=").split(), "data.name=mnist", "data.fallback=none"]
    words += ["launch.nodes=2", f"data.root={site.folder}", "data.download_timeout=0"]
    script = [sys.executable, "experiments/ddp_multinode.py", *words]
    began = time.monotonic()
    done = site.inside("srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", *script)
    assert time.monotonic() - began < SECONDS
    check(
        done,
        f"MNIST is not in the folder {site.folder} and cannot be downloaded (data.download_timeout=0); set data.",
    )
    assert done.returncode == 2, done.stderr
    assert not (site.runs / "by-hand").exists()


# ---- disks


@pytest.mark.parametrize(
    ("change", "messages", "status"),
    [
        ("cat /dev/zero > {disk}/zeros", ["the disk is full; free"], 2),
        (
            "mount -o remount,ro {disk}",
            ["the disk is read-only; choose another folder", "could not start the job; check that this host can write"],
            1,
        ),
    ],
    ids=["full", "read-only"],
)
@pytest.mark.skipif(os.getuid() != 0, reason="NOT TESTED: only root can give a cluster a disk of its own")
def test_a_bad_disk_of_a_submitted_run_is_told_in_time(
    tmp_path_factory: pytest.TempPathFactory, cache: Path, change: str, messages: list[str], status: int
) -> None:
    base = tmp_path_factory.mktemp("disk")  # a short path, for SLURM's sockets
    (base / "runs").mkdir()
    with (
        own_mounts(f"mount -t tmpfs -o size=16M tmpfs {base}/runs") as prefix,
        up(Site(base, cache, (*FIRST, *prefix))) as site,
    ):
        with site.busy():
            submitted = site.submit("ddp_multinode", "", "steps=10")
            assert submitted.returncode == 0, submitted.stderr
            (line,) = [line for line in submitted.stdout.splitlines() if line.startswith("  run folder  ")]
            folder = RunFolder(Path(line.split()[-1]))
            subprocess.run([*prefix, "sh", "-c", change.format(disk=f"{base}/runs")], check=False)
        began = time.monotonic()
        done = site.call("slurm", "logs", str(folder.path), "--follow=1", status=None)
        assert time.monotonic() - began < SECONDS
        for message in messages:
            check_job(site, done, folder, message, status)
        again = site.submit("ddp_multinode", "")
        check(again, f"cannot write {base}/runs/ddp_multinode-")
        assert again.returncode == 2


# ---- the controller, names and paths


def test_a_controller_that_is_silent_or_down_is_told_in_time(
    tmp_path_factory: pytest.TempPathFactory, cache: Path
) -> None:
    with up(Site(tmp_path_factory.mktemp("down"), cache, FIRST)) as site:
        submitted = site.submit("mnist_pipeline", "before", "epochs=500")
        assert submitted.returncode == 0, submitted.stderr
        (pid_file,) = site.folder.glob("cluster-*/run/slurmctld.pid")
        for signals in (["STOP"], ["CONT", "TERM"]):
            for signal in signals:
                site.inside("kill", f"-{signal}", pid_file.read_text().strip())
            began = time.monotonic()
            done = site.submit("mnist_pipeline", "after")
            assert time.monotonic() - began < SECONDS
            assert done.returncode == 2, done.stdout
            down = "the local cluster: the controller does not answer (Slurmctld(primary) at ctl is DOWN); try later"
            check(done, down)
            assert not (site.runs / "after").exists()
            began = time.monotonic()
            shown = site.call("slurm", "status", str(site.run_of("before").path))
            assert "  UNKNOWN  " in shown.stdout and time.monotonic() - began < SECONDS


@pytest.mark.parametrize("path", ["a\nb", "$(touch pwned)", "%j"], ids=["two lines", "a command", "a job number"])
def test_a_path_that_a_job_script_cannot_hold_is_refused(site: Site, path: str) -> None:
    runs = site.runs / "hostile" / path
    done = site.submit("mnist_pipeline", "", shlex.quote(f"runs={runs}"), "steps=5")
    check(done, "control characters" if "\n" in path else "is not allowed in a job script")
    assert done.returncode == 2 and not list((site.runs / "hostile").rglob("mnist_pipeline-*"))
    assert not list(site.folder.rglob("pwned"))


def test_a_run_in_a_folder_with_spaces_finishes(site: Site) -> None:
    runs = site.runs / "two words"
    done = site.submit(
        "mnist_pipeline", "", shlex.quote(f"runs={runs}"), "steps=5", options=("--nodes=2", "--follow=1")
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert site.run_of("two words").result["state"] == "finished"


@pytest.mark.parametrize("name", ["$(touch pwned)", "a\n#SBATCH --uid=0"], ids=["a command", "two lines"])
def test_a_name_that_is_no_experiment_is_refused(site: Site, name: str) -> None:
    done = site.submit(name, "named")
    check(done, f"unknown experiment {name!r}")
    assert done.returncode == 2 and not (site.runs / "named").exists()
    assert not list(site.folder.rglob("pwned"))
