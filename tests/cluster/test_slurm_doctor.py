"""The doctor on a real cluster: silent where all is sound, and naming the host with each planted fault."""

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
from tests.harness.site import FIRST, Site, until

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.getuid() != 0, reason="NOT TESTED: only root can change what one host sees"),
]
NODES = 3
PATIENCE = 8  # seconds for a message
# what a processor quota does: of each tenth of a second, the processes of this host get an eighth, which is less than
# what other tests leave to the ranks of the other hosts
QUOTA = """
import os, pathlib, signal, sys, time

while pathlib.Path(sys.argv[1]).exists():
    found = [int(path.parent.name) for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")
             if b"slurm.reports.doctor\\0" in path.read_bytes()]
    for number, seconds in ((signal.SIGSTOP, 0.0875), (signal.SIGCONT, 0.0125)):
        for pid in found:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
        time.sleep(seconds)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Site]:
    base = tmp_path_factory.mktemp("doctor")
    shutil.copytree(cache, base / "prepared")
    found = Site(base, base / "prepared", FIRST)
    (found.runs).mkdir()
    found.call("slurm", "cluster", "up", f"--nodes={NODES}", "--conf=SlurmdTimeout=300")
    try:
        yield found
    finally:
        found.call("slurm", "cluster", "down")


def doctor(site: Site, nodes: int = NODES, more: str = "") -> dict[str, Any]:
    words = f"--args=runs={site.runs} data.cache={site.cache} {more}"
    done = site.call("slurm", "doctor", f"--nodes={nodes}", words, "--json=1", status=None)
    assert "Traceback" not in done.stderr, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if found["sound"] else 1)
    return found


def cluster(site: Site) -> Cluster:
    folder = find_cluster_folder("local", {"CLUSTER_DIR": str(site.folder)})
    process = Process.load(folder / "holder")
    assert process
    return Cluster(Plan.load(folder), process)


@contextlib.contextmanager
def on_host(site: Site, number: int, begin: str, end: str) -> Iterator[None]:
    """A shell script as root on one host of the cluster, and one that undoes it."""

    def run(script: str) -> None:
        subprocess.run(
            cluster(site).build_command(["sh", "-ec", script], node=number), check=True, stdin=subprocess.DEVNULL
        )

    run(begin)
    try:
        yield
    finally:
        run(end)


def only(found: dict[str, Any], host: str, *words: str) -> None:
    """There is one problem, of this host, in these words."""
    assert len(found["problems"]) == 1, found["problems"]
    (problem,) = found["problems"]
    assert host in problem and all(word in problem for word in words), problem


def test_the_doctor_is_silent_on_a_sound_cluster(site: Site) -> None:
    found = doctor(site)
    assert found["problems"] == [] and found["sound"]
    assert sorted(host["host"] for host in found["hosts"]) == ["node1", "node2", "node3"]
    assert all(host["gflop_per_s"] > 0 and host["disk_mb_per_s"] and host["data"] for host in found["hosts"])
    assert found["wandb"]["mode"] == "disabled", "as WANDB_MODE says"
    assert not list(site.runs.iterdir()), "nothing is left behind"


def test_the_doctor_names_a_host_with_another_package_version(site: Site) -> None:
    info = next(
        Path(str(file.locate()))
        for file in importlib.metadata.files("numpy") or []
        if str(file).endswith("dist-info/METADATA")
    )
    other = site.folder / "METADATA"
    other.write_text(info.read_text().replace(f"Version: {importlib.metadata.version('numpy')}", "Version: 1.0.1", 1))
    with on_host(site, 2, f"mount --bind {other} {info}", f"umount {info}"):
        only(doctor(site), "node2 (rank 1)", "has numpy 1.0.1, but other ranks have")


def other_clock(site: Site, number: int, offset: str) -> contextlib.AbstractContextManager[None]:
    """A host's clock is moved."""
    (library,) = Path("/usr/lib").glob("*/faketime/libfaketime.so.1")
    folder = site.folder / f"etc-of-node{number}"
    begin = f"""cp -a /etc {folder}
echo {library} > {folder}/ld.so.preload
echo '{offset}' > {folder}/faketimerc
mount --bind {folder} /etc"""
    return on_host(site, number, begin, "umount /etc")


def test_the_doctor_names_a_host_whose_clock_was_moved(site: Site) -> None:
    with other_clock(site, 3, "+90s"):
        only(doctor(site), "node3 (rank 2)", "its clock differs by +90.", "set up NTP")
    assert doctor(site)["sound"]


def test_the_doctor_names_one_of_two_clocks_however_many_processes_a_host_has(site: Site) -> None:
    with other_clock(site, 2, "+1.8s"):
        found = doctor(site, 2, "cluster.processes=2")
    assert [host["host"] for host in found["hosts"]] == ["node1", "node1", "node2", "node2"]
    only(found, "node2 (rank 2) and node1 (rank 0): their clocks differ by +1.8 s; set up NTP")


def test_the_doctor_names_a_host_whose_disk_is_full(site: Site) -> None:
    begin = f"mount -t tmpfs -o size=8M tmpfs {site.runs}; cat /dev/zero > {site.runs}/zeros || true"
    with on_host(site, 2, begin, f"umount {site.runs}"):
        only(doctor(site), "node2 (rank 1)", f"cannot write {site.runs}: the disk is full; free up space")


def test_the_doctor_names_a_wrong_data_file_on_one_host(site: Site) -> None:
    (file,) = site.cache.glob("digits*/train_labels.npy")
    raw = bytearray(file.read_bytes())
    raw[1000] ^= 1
    (site.folder / "wrong.npy").write_bytes(raw)
    with on_host(site, 1, f"mount --bind {site.folder}/wrong.npy {file}", f"umount {file}"):
        only(doctor(site), "node1 (rank 0)", f"{file} is damaged (checksum differs)")


def test_the_doctor_names_a_slow_host(site: Site) -> None:
    flag = site.folder / "throttled"
    flag.touch()
    command = cluster(site).build_command([sys.executable, "-c", QUOTA, str(flag)], node=2)
    with subprocess.Popen(command) as throttle:
        try:
            only(doctor(site), "node2 (rank 1) is slow: matrix products at")
        finally:
            assert throttle.poll() is None
            flag.unlink()


@pytest.mark.parametrize(
    ("signal", "cause"),
    [
        ("KILL", r"rank 1 on node2 ended without an error message \(Killed\)"),
        ("STOP", f"rank 1 on node2 did not answer within {PATIENCE} s"),
    ],
)
def test_the_doctor_names_the_rank_that_a_run_failed_of(site: Site, signal: str, cause: str) -> None:
    words = ("steps=100000", "epochs=500", "cluster.requeue=false", "width=16", f"launch.step_timeout={PATIENCE}")
    done = site.submit("mnist_pipeline", signal, *words)
    assert done.returncode == 0, done.stderr
    folder = site.run_of(signal)
    until("steps", folder.read_metrics)
    find = f"pgrep -f '[s]ubmitit.core._submit {folder.path}'"
    subprocess.run(cluster(site).build_command(["sh", "-c", f"kill -{signal} $({find})"], node=2), check=True)
    assert "cluster.requeue=false" in site.wait(folder, "FAILED", 60 + PATIENCE)
    site.gone(folder)
    found = site.call("slurm", "doctor", f"--run={folder.path}").stdout
    assert re.search(f"likely cause  .*{cause}", found), found
    assert re.search(r"first error  \S+ \S+ rank 0 on node1: after step \d+", found), found
    assert all(f"rank {rank}    node{rank + 1}         heartbeat at step " in found for rank in (0, 1)), found
    assert ("stuck at " in found) == (signal == "STOP"), found


def test_the_doctor_names_a_host_whose_cable_is_cut(site: Site) -> None:
    site.call("slurm", "cluster", "cut", "3")
    try:
        found = doctor(site)
    finally:
        site.call("slurm", "cluster", "join", "3")
    only(found, "node3: ")
