"""Wrong input and failures on a real cluster: one clear message in time, the right exit status, no process left."""

from __future__ import annotations

import contextlib
import os
import re
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
from tests.harness.slurm.cluster_site import HIGH_PRIORITY, Site, create_mount_namespace, start_cluster

pytestmark = pytest.mark.timeout(300)
SECONDS = 90  # less than the timeout of a message: no rank waited for one that had exited


def check(process: subprocess.CompletedProcess[str], message: str) -> None:
    """Check that a command printed this error only, and no traceback."""
    output = process.stdout + process.stderr
    assert message in output, output
    assert "Traceback" not in output, output
    assert sum(line.startswith("error: ") for line in output.splitlines()) <= 1, output


def check_job(
    site: Site, process: subprocess.CompletedProcess[str], folder: RunFolder, message: str, status: int = 2
) -> None:
    """Check that a followed job failed, that `make status` names the cause, too, and that no process is left."""
    check(process, message)
    assert process.returncode == status, process.stdout + process.stderr
    logs = [log.read_text() for log in folder.path.glob("submit/*_log.out")]
    assert not any("Traceback" in text for text in logs), logs
    assert message in site.execute_module("slurm", "status", str(folder.path)).stdout
    site.wait_for_exit(folder)


def check_in_time(site: Site, folder: RunFolder) -> None:
    """Check the time from the job's start until the cause of its failure was written."""
    job = next(folder.path.glob("submit/*_0_log.out")).name.partition("_")[0]
    fields = site.execute_in_cluster("scontrol", "-o", "show", "job", job, SLURM_TIME_FORMAT="%s").stdout.split()
    (start,) = [float(field.partition("=")[2]) for field in fields if field.startswith("StartTime=")]
    assert (folder.path / "result.json").stat().st_mtime - start < SECONDS


def submit_and_follow(site: Site, runs: str, *settings: str) -> subprocess.CompletedProcess[str]:
    return site.submit("ddp_multinode", runs, "steps=10", *settings, options=("--nodes=2", "--follow=1"))


# ---- names and interfaces


@contextlib.contextmanager
def replace_host_names(site: Site, number: int, names: str) -> Iterator[None]:
    """Replace /etc/hosts on one host of the cluster; the other host and this machine keep theirs."""
    file = site.folder / "hosts"
    file.write_text(f"127.0.0.1 localhost\n10.77.0.254 ctl\n{names}\n")
    environ = {"CLUSTER_DIR": str(site.folder)}
    holder = Process.load(cluster.find_cluster_folder("local", environ) / "holder")
    assert holder
    plan = slurm_conf.Plan.load(cluster.find_cluster_folder("local", environ))

    def on_host(*argv: str) -> None:
        def body() -> None:
            record = daemons.locate_host_process_record(plan, number)
            namespaces.enter_namespaces(int(record.read_text().split()[0]))
            subprocess.run(argv, check=True)

        assert namespaces.run_in_namespaces(holder, body) == 0

    on_host("mount", "--bind", str(file), "/etc/hosts")
    try:
        yield
    finally:
        on_host("umount", "/etc/hosts")


@pytest.mark.parametrize(
    "number, names, message",
    [
        (2, "10.77.0.2 node2", "node2 cannot reach rank 0 on node1 (address ?, interface none, ports "),
        (1, "127.0.1.1 node1\n10.77.0.2 node2", "resolves to 127.0.1.1, which other hosts cannot reach"),
    ],
    ids=["the other host", "loopback"],
)
def test_an_unreachable_name_of_rank_0_is_reported_in_time(site: Site, number: int, names: str, message: str) -> None:
    runs = f"name-{number}-{len(names)}"
    with replace_host_names(site, number, names):
        process = submit_and_follow(site, runs)
    check_job(site, process, site.get_only_run(runs), message)
    check_in_time(site, site.get_only_run(runs))


def test_a_missing_interface_is_reported_in_time(site: Site) -> None:
    process = submit_and_follow(site, "interface", "launch.interface=eth9")
    check_job(site, process, site.get_only_run("interface"), "launch.interface=eth9 does not exist on node")
    check_in_time(site, site.get_only_run("interface"))
    assert "use one of: lo (127.0.0.1), eth0 (10.77.0." in process.stdout


# ---- data


def test_data_deleted_between_submission_and_start_are_reported_in_time(site: Site) -> None:
    images = site.folder / "images"
    prepared = site.folder / "prepared"
    for part in ("train", "val"):
        for label, colour in enumerate(("red", "blue")):
            (images / part / colour).mkdir(parents=True)
            for number in range(4 - label):
                Image.new("RGB", (9, 9), colour).save(images / part / colour / f"{number}.png")
    data = ("data.name=imagefolder", f"data.root={images}", f"data.cache={prepared}")
    with site.occupy_hosts():
        submitted = site.submit("ddp_multinode", "vanished", "steps=10", "batch=4", "optim.base_batch=4", *data)
        assert submitted.returncode == 0, submitted.stderr
        shutil.rmtree(images)
        shutil.rmtree(prepared)
    folder = site.get_only_run("vanished")
    process = site.execute_module("slurm", "logs", str(folder.path), "--follow=1", status=None)
    check_job(site, process, folder, f"{images}/train is missing; set data.root to a folder with train/<class>/*")
    check_in_time(site, folder)


def test_srun_by_hand_without_data_is_refused_in_time(site: Site) -> None:
    settings = site.format_settings_option("by-hand").removeprefix("--args=").split()
    settings += ["data.name=mnist", "data.fallback=none", f"data.root={site.folder}", "data.download_timeout=0"]
    script = [sys.executable, "experiments/ddp_multinode.py", "launch.nodes=2", *settings]
    start_time = time.monotonic()
    process = site.execute_in_cluster("srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", *script)
    assert time.monotonic() - start_time < SECONDS
    check(
        process,
        f"MNIST is not in the folder {site.folder} and cannot be downloaded (data.download_timeout=0); set data.",
    )
    assert process.returncode == 2, process.stderr
    assert not (site.runs / "by-hand").exists()


# ---- disks


@pytest.mark.parametrize(
    "change, messages, status",
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
def test_an_unwritable_disk_of_a_submitted_run_is_reported_in_time(
    tmp_path_factory: pytest.TempPathFactory, cache: Path, change: str, messages: list[str], status: int
) -> None:
    base = tmp_path_factory.mktemp("disk")  # a short path, for SLURM's sockets
    (base / "runs").mkdir()
    with (
        create_mount_namespace(f"mount -t tmpfs -o size=16M tmpfs {base}/runs") as prefix,
        start_cluster(Site(base, cache, (*HIGH_PRIORITY, *prefix))) as site,
    ):
        with site.occupy_hosts():
            submitted = site.submit("ddp_multinode", "", "steps=10")
            assert submitted.returncode == 0, submitted.stderr
            (path,) = re.findall(r"^  run folder  .*?(\S+)$", submitted.stdout, re.MULTILINE)
            folder = RunFolder(Path(path))
            subprocess.run([*prefix, "sh", "-c", change.format(disk=f"{base}/runs")], check=False)
        start_time = time.monotonic()
        process = site.execute_module("slurm", "logs", str(folder.path), "--follow=1", status=None)
        assert time.monotonic() - start_time < SECONDS
        for message in messages:
            check_job(site, process, folder, message, status)
        second = site.submit("ddp_multinode", "")
        check(second, f"cannot write {base}/runs/ddp_multinode-")
        assert second.returncode == 2


# ---- the controller, names and paths


def test_a_silent_or_stopped_controller_is_reported_in_time(
    tmp_path_factory: pytest.TempPathFactory, cache: Path
) -> None:
    with start_cluster(Site(tmp_path_factory.mktemp("down"), cache, HIGH_PRIORITY)) as site:
        submitted = site.submit("mnist_pipeline", "before", "epochs=500")
        assert submitted.returncode == 0, submitted.stderr
        (pid_file,) = site.folder.glob("cluster-*/run/slurmctld.pid")
        for signals in (["STOP"], ["CONT", "TERM"]):
            for signal in signals:
                site.execute_in_cluster("kill", f"-{signal}", pid_file.read_text().strip())
            start_time = time.monotonic()
            process = site.submit("mnist_pipeline", "after")
            assert time.monotonic() - start_time < SECONDS
            assert process.returncode == 2, process.stdout
            message = "the local cluster: the controller does not answer (Slurmctld(primary) at ctl is DOWN); try later"
            check(process, message)
            assert not (site.runs / "after").exists()
            start_time = time.monotonic()
            status = site.execute_module("slurm", "status", str(site.get_only_run("before").path))
            assert time.monotonic() - start_time < SECONDS
            assert "  UNKNOWN  " in status.stdout


@pytest.mark.parametrize("path", ["a\nb", "$(touch pwned)", "%j"], ids=["two lines", "a command", "a job number"])
def test_a_path_that_a_job_script_cannot_hold_is_refused(site: Site, path: str) -> None:
    runs = site.runs / "hostile" / path
    process = site.submit("mnist_pipeline", "", shlex.quote(f"runs={runs}"), "steps=5")
    check(process, "control characters" if "\n" in path else "is not allowed in a job script")
    assert process.returncode == 2
    assert not list((site.runs / "hostile").rglob("mnist_pipeline-*"))
    assert not list(site.folder.rglob("pwned"))


def test_a_run_in_a_folder_with_spaces_finishes(site: Site) -> None:
    runs = site.runs / "two words"
    process = site.submit(
        "mnist_pipeline", "", shlex.quote(f"runs={runs}"), "steps=5", options=("--nodes=2", "--follow=1")
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert site.get_only_run("two words").result["state"] == "finished"


@pytest.mark.parametrize("name", ["$(touch pwned)", "a\n#SBATCH --uid=0"], ids=["a command", "two lines"])
def test_an_unknown_experiment_is_refused(site: Site, name: str) -> None:
    process = site.submit(name, "named")
    check(process, f"unknown experiment {name!r}")
    assert process.returncode == 2
    assert not (site.runs / "named").exists()
    assert not list(site.folder.rglob("pwned"))
