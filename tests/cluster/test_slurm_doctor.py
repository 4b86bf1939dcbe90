"""The doctor on a real cluster: no findings on a healthy cluster, and the host of each planted fault."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.system.processes import Process
from slurm.local_cluster.cluster import Cluster, find_cluster_folder
from slurm.local_cluster.slurm_conf import Plan
from tests.harness.slurm.cluster_site import HIGH_PRIORITY, Site, wait_on_cluster

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.getuid() != 0, reason="NOT TESTED: only root can change what one host sees"),
]
NODES = 3
STEP_TIMEOUT = 8  # seconds for a message
# A processor quota: the processes of this host get an eighth of each tenth of a second. This is less than what other
# tests leave to the ranks of the other hosts.
QUOTA = """
import os, pathlib, signal, sys, time

while pathlib.Path(sys.argv[1]).exists():
    pids = [int(path.parent.name) for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")
             if b"slurm.reports.doctor\\0" in path.read_bytes()]
    for number, seconds in ((signal.SIGSTOP, 0.0875), (signal.SIGCONT, 0.0125)):
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
        time.sleep(seconds)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Site]:
    base = tmp_path_factory.mktemp("site")  # a short path, for SLURM's sockets
    shutil.copytree(cache, base / "prepared")
    three_hosts = Site(base, base / "prepared", HIGH_PRIORITY)
    three_hosts.runs.mkdir()
    three_hosts.execute_module("slurm", "cluster", "up", f"--nodes={NODES}", "--conf=SlurmdTimeout=300")
    try:
        yield three_hosts
    finally:
        three_hosts.execute_module("slurm", "cluster", "down")


def doctor(site: Site, nodes: int = NODES, settings: str = "") -> dict[str, Any]:
    """Return the doctor's report, and check that its exit status agrees."""
    settings = f"--args=runs={site.runs} data.cache={site.cache} {settings}"
    process = site.execute_module("slurm", "doctor", f"--nodes={nodes}", settings, "--json=1", status=None)
    assert "Traceback" not in process.stderr, process.stderr
    report: dict[str, Any] = json.loads(process.stdout)
    assert process.returncode == (0 if report["sound"] else 1)
    return report


def cluster(site: Site) -> Cluster:
    folder = find_cluster_folder("local", {"CLUSTER_DIR": str(site.folder)})
    process = Process.load(folder / "holder")
    assert process
    return Cluster(Plan.load(folder), process)


@contextlib.contextmanager
def on_host(site: Site, number: int, begin: str, end: str) -> Iterator[None]:
    """Run a shell script as root on one host of the cluster, and later a script that undoes it."""

    def run(script: str) -> None:
        command = cluster(site).build_command(["sh", "-ec", script], node=number)
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)

    run(begin)
    try:
        yield
    finally:
        run(end)


def check_only_problem(report: dict[str, Any], *phrases: str) -> None:
    """Check that the report contains one problem, with all these phrases."""
    assert len(report["problems"]) == 1, report["problems"]
    (problem,) = report["problems"]
    for phrase in phrases:
        assert phrase in problem, problem


def test_the_doctor_finds_no_problem_on_a_healthy_cluster(site: Site) -> None:
    report = doctor(site)
    assert report["problems"] == []
    assert report["sound"]
    assert sorted(host["host"] for host in report["hosts"]) == ["node1", "node2", "node3"]
    for host in report["hosts"]:
        assert host["gflop_per_s"] > 0
        assert host["disk_mb_per_s"]
        assert host["data"]
    assert report["wandb"]["mode"] == "disabled", "WANDB_MODE disables W&B"
    assert not list(site.runs.iterdir()), "no file is left"


def test_a_missing_network_interface_is_named(site: Site) -> None:
    (problem, *_) = doctor(site, settings="launch.interface=eth9")["problems"]
    assert "launch.interface=eth9 does not exist on node" in problem


def test_the_doctor_names_a_host_with_another_package_version(site: Site) -> None:
    files = importlib.metadata.files("numpy") or []
    (file,) = [file for file in files if str(file).endswith("dist-info/METADATA")]
    metadata = Path(str(file.locate()))
    version = importlib.metadata.version("numpy")
    changed = site.folder / "METADATA"
    changed.write_text(metadata.read_text().replace(f"Version: {version}", "Version: 1.0.1", 1))
    with on_host(site, 2, f"mount --bind {changed} {metadata}", f"umount {metadata}"):
        check_only_problem(doctor(site), "node2 (rank 1)", "has numpy 1.0.1, but other ranks have")


def shift_clock(site: Site, number: int, offset: str) -> contextlib.AbstractContextManager[None]:
    """Shift a host's clock."""
    (library,) = Path("/usr/lib").glob("*/faketime/libfaketime.so.1")
    folder = site.folder / f"etc-of-node{number}"
    begin = f"""cp -a /etc {folder}
echo {library} > {folder}/ld.so.preload
echo '{offset}' > {folder}/faketimerc
mount --bind {folder} /etc"""
    return on_host(site, number, begin, "umount /etc")


def test_the_doctor_names_a_host_whose_clock_was_shifted(site: Site) -> None:
    with shift_clock(site, 3, "+90s"):
        check_only_problem(doctor(site), "node3 (rank 2)", "its clock differs by +90.", "set up NTP")
    assert doctor(site)["sound"]


def test_the_doctor_compares_two_clocks_also_with_several_processes_per_host(site: Site) -> None:
    with shift_clock(site, 2, "+1.8s"):
        report = doctor(site, 2, "cluster.processes=2")
    assert [host["host"] for host in report["hosts"]] == ["node1", "node1", "node2", "node2"]
    check_only_problem(report, "node2 (rank 2) and node1 (rank 0): their clocks differ by +1.8 s; set up NTP")


def test_the_doctor_names_a_host_whose_disk_is_full(site: Site) -> None:
    begin = f"mount -t tmpfs -o size=8M tmpfs {site.runs}; cat /dev/zero > {site.runs}/zeros || true"
    with on_host(site, 2, begin, f"umount {site.runs}"):
        check_only_problem(doctor(site), "node2 (rank 1)", f"cannot write {site.runs}: the disk is full; free up space")


def test_the_doctor_names_a_wrong_data_file_on_one_host(site: Site) -> None:
    (file,) = site.cache.glob("digits*/train_labels.npy")
    raw = bytearray(file.read_bytes())
    raw[1000] ^= 1
    (site.folder / "wrong.npy").write_bytes(raw)
    with on_host(site, 1, f"mount --bind {site.folder}/wrong.npy {file}", f"umount {file}"):
        check_only_problem(doctor(site), "node1 (rank 0)", f"{file} is damaged (checksum differs)")


def test_the_doctor_names_a_slow_host(site: Site) -> None:
    flag = site.folder / "throttled"
    flag.touch()
    command = cluster(site).build_command([sys.executable, "-c", QUOTA, str(flag)], node=2)
    with subprocess.Popen(command) as throttle:
        try:
            check_only_problem(doctor(site), "node2 (rank 1) is slow: matrix products at")
        finally:
            assert throttle.poll() is None
            flag.unlink()


@pytest.mark.parametrize(
    "signal, cause",
    [
        ("KILL", r"rank 1 on node2 ended without an error message \(Killed\)"),
        ("STOP", f"rank 1 on node2 did not answer within {STEP_TIMEOUT} s"),
    ],
)
def test_the_doctor_names_the_rank_that_made_a_run_fail(site: Site, signal: str, cause: str) -> None:
    settings = (
        "steps=100000",
        "epochs=500",
        "cluster.requeue=false",
        "width=16",
        f"launch.step_timeout={STEP_TIMEOUT}",
    )
    process = site.submit("mnist_pipeline", signal, *settings)
    assert process.returncode == 0, process.stderr
    folder = site.get_only_run(signal)
    wait_on_cluster("steps", folder.read_metrics)
    find = f"pgrep -f '[s]ubmitit.core._submit {folder.path}'"
    subprocess.run(cluster(site).build_command(["sh", "-c", f"kill -{signal} $({find})"], node=2), check=True)
    assert "cluster.requeue=false" in site.wait_for_state(folder, "FAILED", 60 + STEP_TIMEOUT)
    site.wait_for_exit(folder)
    report = site.execute_module("slurm", "doctor", f"--run={folder.path}").stdout
    assert re.search(f"likely cause  .*{cause}", report), report
    assert re.search(r"first error  \S+ \S+ rank 0 on node1: after step \d+", report), report
    for rank in (0, 1):
        assert f"rank {rank}    node{rank + 1}         heartbeat at step " in report, report
    assert ("stuck at " in report) == (signal == "STOP"), report


def test_the_doctor_names_a_host_whose_cable_is_cut(site: Site) -> None:
    site.execute_module("slurm", "cluster", "cut", "3")
    try:
        report = doctor(site)
    finally:
        site.execute_module("slurm", "cluster", "join", "3")
    check_only_problem(report, "node3: ")
