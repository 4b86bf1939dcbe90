"""Runs on the hosts of a local cluster, the last of which may have a slow cable."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from common.config.config import ROOT
from common.runs.folder import RunFolder
from common.runs.result import parse_result
from common.system.errors import UserError
from common.system.processes import Process
from slurm.local_cluster import cables, daemons, namespaces, slurm_conf
from slurm.local_cluster.cables import Shape
from slurm.local_cluster.cluster import Cluster, find_cluster_folder
from slurm.local_cluster.slurm_conf import Plan
from tests.benchmarks.measure import Load, Task
from tests.benchmarks.parts import discard_run, environment, finish, flatten

HOSTS = 4
WARM_UP = 10  # steps


def find_obstacle(shape: Shape) -> str:
    """Return why this machine cannot start such a cluster; empty if it can."""
    os.environ["PATH"] = slurm_conf.make_search_path()  # tc is an administrators' program
    try:
        slurm_conf.check_programs(slurm_conf.choose_auth(), database=False)
        cables.check_shaping_support(shape)
    except UserError as error:
        return str(error)
    return ""


class BenchmarkCluster(NamedTuple):
    """A local cluster that is up during a measurement."""

    env: Mapping[str, str]
    """Environment of programs that use the cluster."""
    process: Process
    """First process of the cluster. All processes of jobs and daemons are its descendants."""

    def measure_load(self) -> Load:
        """Return the present load. The processes of the cluster count as part of the benchmark."""
        return Load.now(self.process.pid)


@contextlib.contextmanager
def local_cluster(
    folder: Path, count: int = HOSTS, *, rate: str = "", last: Shape = Shape()
) -> Iterator[BenchmarkCluster]:
    """A separate local cluster, whose cables have this rate and that of the last host this shape."""
    env = environment() | {"CLUSTER_DIR": str(folder)}
    del env["GLOO_SOCKET_IFNAME"]

    def call(*arguments: str) -> None:
        command = [sys.executable, "-m", "slurm", "cluster", *arguments]
        process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        if process.returncode:
            raise RuntimeError(f"{' '.join(arguments)}: {process.stderr}")

    call("up", f"--nodes={count}", f"--rate={rate}")
    try:
        state = find_cluster_folder("local", env)
        process = Process.load(state / "holder")
        if process is None:
            raise RuntimeError("the cluster is gone")
        if any(last):
            shape_cable(Cluster(Plan.load(state), process), count, last)
        yield BenchmarkCluster(env, process)
    finally:
        call("down")


def shape_cable(cluster: Cluster, number: int, shape: Shape) -> None:
    """Shape both ends of a host's cable: that at the switch, and that in the host."""

    def shape_ends() -> None:
        os.environ["PATH"] = slurm_conf.make_search_path()
        cables.shape_device(slurm_conf.format_host_name(number), shape)
        host = daemons.find_running_host_process(cluster.plan, number)
        status = namespaces.run_in_namespaces(host, lambda: cables.shape_device("eth0", shape))
        if status:
            sys.exit(status)  # the error message has been printed

    cluster.run_as_root(shape_ends)


def time_steps(folder: RunFolder, first: int = WARM_UP) -> tuple[float, float]:
    """Return the seconds of a step and the samples/s by the clock of a run, from the end of step `first` + 1 on."""
    rows = [row for row in folder.read_metrics() if "test_loss" not in row]
    seconds = rows[-1]["time"] - rows[first]["time"]
    samples = rows[-1]["samples"] - rows[first]["samples"]
    return seconds / (len(rows) - first - 1), samples / seconds


def run_on_hosts(
    scratch: Path,
    label: str,
    experiment: str,
    *settings: str,
    last: Shape = Shape(),
    count: int = HOSTS,
    keep: Sequence[str] = (),
) -> Task:
    """A run with a rank on each of `count` hosts of a cluster; `keep` as in `run_of`.

    Its `samples_per_second` are by the clock of the whole training, the meetings of all ranks included.
    """

    def run(number: int) -> dict[str, float]:
        with local_cluster(scratch, count, last=last) as cluster:
            before = cluster.measure_load()
            folder = finish(scratch, label, experiment, *settings, nodes=count, env=cluster.env)
            others = cluster.measure_load().compute_other_share(before)
        result = parse_result(folder.result).flatten_values()
        seconds, rate = time_steps(folder)
        measured = {"seconds": seconds, "samples_per_second": rate, "others": others}
        for name in keep:
            measured |= flatten(name, result[name])
        discard_run(folder)
        return measured

    return Task(label, run)
