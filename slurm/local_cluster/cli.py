"""A real SLURM cluster on one machine: real daemons, each host with its own name, address and processes.

    python -m slurm cluster up [--nodes 2] [--cpus N] [--rate 200mbit] [--delay 5ms] [--db] [--conf Key=Value ...]
    python -m slurm cluster status | shell | exec CMD... | node N CMD... | down
    python -m slurm cluster cut N | join N | power-off N | power-on N | preempt [JOB] | requeue JOB

Needs Linux and Debian's or Ubuntu's packages slurm-wlm and iproute2; no root, no change to the machine.
Hosts are `node1`, `node2`, ... and share the machine's files; the controller is `ctl`. They reach each
other and nothing else: no internet. Jobs run as the caller. Partition `main` is the default and can be
preempted by `high`. Every verb takes --name NAME: clusters of different names do not see each other.

`--conf` sets a line of slurm.conf: KillWait=30, SlurmdTimeout=10, GraceTime=5 (of partition main),
SlurmctldParameters=preempt_send_user_signal. All state lies in one folder, under CLUSTER_DIR if that is
set, else under XDG_RUNTIME_DIR or /tmp.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from common.core.errors import UserError
from common.core.processes import Process
from common.core.text import format_count
from slurm.arguments import parse_count, parse_switch
from slurm.local_cluster import cables, daemons, slurm_conf
from slurm.local_cluster.cluster import (
    DEFAULT,
    Cluster,
    choose_running_cluster,
    find_cluster_folder,
    find_running_cluster,
    list_running_clusters,
    require_running_cluster,
)
from slurm.local_cluster.namespaces import check_user
from slurm.local_cluster.slurm_conf import Plan


@contextlib.contextmanager
def lock_folder(name: str) -> Iterator[Path]:
    """Make the state folder if need be, check that it is ours, and lock it. Raises UserError."""
    folder = slurm_conf.check_folder(find_cluster_folder(name))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; set CLUSTER_DIR to a folder that you may write") from None
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise UserError(f"{folder} belongs to somebody else; set CLUSTER_DIR to another folder")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def start_cluster(given: argparse.Namespace) -> None:
    """Start a cluster and wait until its hosts are idle."""
    nodes = parse_count("NODES", given.nodes or "2", slurm_conf.MOST_NODES)
    cpus = parse_count("--cpus", given.cpus or str(max(2, os.cpu_count() or 1)), 1024)
    settings, database = slurm_conf.parse_settings(given.conf), parse_switch("DB", given.db)
    shape = cables.parse_shape(given.rate, given.delay)
    auth = given.auth or slurm_conf.choose_auth()
    slurm_conf.check_programs(auth, database)
    cables.check_shaping_support(shape)
    user = check_user(os.getuid())
    with lock_folder(given.name) as folder:
        if found := find_running_cluster(given.name):
            there = cables.Shape(found.plan.rate, found.plan.delay)
            asked = (bool(given.nodes), nodes, found.plan.nodes), (any(shape), shape, there)
            if any(is_given and wanted != had for is_given, wanted, had in asked):
                down = "make cluster-down" + ("" if given.name == DEFAULT else f" NAME={given.name}")
                has = f"NODES={found.plan.nodes}" + (f" and cables {there.describe()}" if any(shape + there) else "")
                raise UserError(f"cluster {given.name} is up already, with {has}; first: {down}")
            print(f"cluster {given.name} is up already")
            return
        began = time.monotonic()
        last = (folder / "first_job").read_text() if (folder / "first_job").exists() else "0"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
        uid, gid, first = os.getuid(), os.getgid(), slurm_conf.choose_first_job_id(int(last), time.time())
        plan = Plan(given.name, folder, nodes, cpus, memory, user, uid, gid, auth, database, first, settings, *shape)
        slurm_conf.write_cluster_files(plan)
        daemons.fork_cluster(plan)
        try:
            wait_until_idle(plan, seconds=30 + nodes + 30 * database)
        except BaseException:  # also Ctrl-C: half a cluster is of no use
            end_cluster(folder)
            raise
    slow = f", cables {shape.describe()}" if any(shape) else ""
    hosts = f"{format_count(nodes, 'host')} with {format_count(cpus, 'CPU')} each{slow}"
    print(f"cluster {given.name} is up: {hosts}, idle after {time.monotonic() - began:.1f} s")


def wait_until_idle(plan: Plan, seconds: float) -> None:
    """Wait until every host is idle. Raises UserError with the daemons' complaint."""
    end = time.monotonic() + seconds
    asked = ("sinfo", "--noheader", "--partition=main", "--states=idle", "--responding", "--format=%D")
    while time.monotonic() < end:
        cluster = find_running_cluster(plan.name)
        if not cluster:
            break
        # asked too early, sinfo would sleep for a second
        if daemons.locate_process_record(plan, plan.nodes).exists() and cluster.run(*asked, check=False) == str(
            plan.nodes
        ):
            return
        time.sleep(0.02)
    raise UserError(f"cluster {plan.name} did not start: {find_error_line(plan.folder / 'log')}; see {plan.folder}/log")


def find_error_line(logs: Path) -> str:
    """Find the error that a daemon died of, else the one that kept the cluster from starting."""
    lines = [line for log in sorted(logs.glob("*.log")) for line in log.read_text(errors="replace").splitlines()]
    for mark in ("Parsing error", "fatal: "):
        for line in lines:
            if mark in line:
                return line.rpartition(": error: " if mark == "Parsing error" else mark)[2]
    own = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return own[0] if own else "its hosts did not become idle in time"


def end_cluster(folder: Path) -> None:
    """End the cluster of a folder, if it runs."""
    process = Process.load(folder / "holder")
    if process:
        process.kill()
    (folder / "holder").unlink(missing_ok=True)


def stop_cluster(given: argparse.Namespace) -> None:
    """End a cluster. Its logs stay until the next `up`."""
    if not find_running_cluster(given.name):
        if given.is_chosen:
            print(f"cluster {given.name} is not up")
            return
        names = list_running_clusters()
        others = f"those that are up: {', '.join(names)}" if names else "no cluster is up"
        raise UserError(f"cluster {given.name} is not up; {others}")
    with lock_folder(given.name) as folder:
        end_cluster(folder)
        for name in set(slurm_conf.FOLDERS) - {"log"}:
            shutil.rmtree(folder / name, ignore_errors=True)
    print(f"cluster {given.name} is down; its logs are in {folder}/log")


def print_status(given: argparse.Namespace) -> None:
    """Print what is up and the state of every host."""
    cluster = require_running_cluster(given.name)
    plan = cluster.plan
    print(f"cluster {plan.name} is up: first process {cluster.process.pid}, files in {plan.folder}", flush=True)
    states = dict(line.split() for line in cluster.run("sinfo", "-h", "-p", "main", "-N", "-o", "%N %T").splitlines())
    cluster.run_as_root(lambda: daemons.print_hosts(plan, states))


def exec_in_cluster(given: argparse.Namespace) -> None:
    """Run a command inside, in this folder, in place of this process."""
    cluster = require_running_cluster(given.name)
    number = parse_host(cluster, given.node) if given.verb == "node" else 0
    if number:
        cluster.run_as_root(lambda: daemons.require_host(cluster.plan, number))
    argv = given.command[1:] if given.command[:1] == ["--"] else given.command
    if given.verb == "shell":
        argv = [os.environ.get("SHELL", "/bin/sh")]
        print(f"on the controller of cluster {given.name}: sbatch, srun, squeue, sinfo; exit leaves", file=sys.stderr)
    if not argv:
        raise UserError(f"{given.verb}: a command is missing, such as: exec sinfo")
    command = cluster.build_command(argv, node=number)
    os.execvp(command[0], command)


def parse_host(cluster: Cluster, text: str) -> int:
    """Parse the number of a host, given as `2` or `node2`. Raises UserError."""
    return parse_count("N", text.removeprefix("node"), cluster.plan.nodes)


def cut_or_restore_host(given: argparse.Namespace) -> None:
    """Cut a host's cable or power, or bring them back."""
    cluster = require_running_cluster(given.name)
    number = parse_host(cluster, given.node)
    cluster.run_as_root(lambda: daemons.VERBS[given.verb](cluster.plan, number))
    print(f"{given.verb}: {slurm_conf.format_host_name(number)}")


def preempt_job(given: argparse.Namespace) -> None:
    """Submit a short job of high priority that wants the hosts of one job, or all hosts, for itself."""
    cluster = require_running_cluster(given.name)
    where = "--states=idle,mixed,allocated", "--responding", "--format=%N"
    nodes = cluster.run("sinfo", "--noheader", "--partition=main", *where).replace("\n", ",")
    if given.job:
        nodes = cluster.run("squeue", "--noheader", "--states=running", f"--jobs={given.job}", "--format=%N")
    if not nodes:
        raise UserError(f"job {given.job} does not run" if given.job else "no host is ready for a job")
    job = ["--parsable", "--partition=high", "--exclusive", "--job-name=preempt", "--output=/dev/null", "--time=1"]
    count = len(cluster.run("scontrol", "show", "hostnames", nodes).splitlines())
    number = cluster.run("sbatch", *job, f"--nodes={count}", f"--nodelist={nodes}", "--wrap=sleep 2")
    print(f"job {number} of partition high asks for {nodes}")


def requeue_job(given: argparse.Namespace) -> None:
    """Put a running job back into the queue, as an administrator would."""
    require_running_cluster(given.name).run("scontrol", "requeue", given.job)


ARGUMENTS = {
    "node": "host, as 2 or node2",
    "command": "command and its arguments",
    "job": "id of a job",
}


def describe_verb(function: Callable[..., object]) -> str:
    """Return the first line of a docstring for a user: without the errors that the function raises."""
    first = (function.__doc__ or "").partition("\n")[0]
    return first.partition(" Raises ")[0]


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all verbs."""
    top = argparse.ArgumentParser(
        prog="python -m slurm cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    def add(name: str, function: Callable[[argparse.Namespace], None], *words: str) -> argparse.ArgumentParser:
        described = describe_verb(function if function is not cut_or_restore_host else daemons.VERBS[name])
        added = verbs.add_parser(name, help=described, description=described)
        rule = f"{DEFAULT}, or the only one that is up" if function is not start_cluster else DEFAULT
        added.add_argument("--name", default="", help=f"of the cluster ({rule})")
        added.set_defaults(function=function)
        for word in words:
            added.add_argument(word, nargs=argparse.REMAINDER if word == "command" else None, help=ARGUMENTS[word])
        return added

    options = add("up", start_cluster)
    options.add_argument("--nodes", default="", help=f"hosts, 1 to {slurm_conf.MOST_NODES} (2)")
    options.add_argument("--cpus", default="", help="CPUs that each host claims to have (the machine's, at least 2)")
    options.add_argument("--rate", default="", help="of each cable in each direction, such as 200mbit (the machine's)")
    options.add_argument("--delay", default="", help="of each cable in each direction, such as 5ms (none)")
    options.add_argument("--db", nargs="?", const="1", default="", help="accounting in a private MariaDB")
    options.add_argument("--conf", action="append", default=[], metavar="Key=Value", help="a line of slurm.conf")
    options.add_argument("--auth", choices=("none", "munge"), help="none if SLURM was built with it")
    add("down", stop_cluster)
    add("status", print_status)
    add("shell", exec_in_cluster).set_defaults(command=[])
    add("exec", exec_in_cluster, "command")
    add("node", exec_in_cluster, "node", "command")
    for name in daemons.VERBS:
        add(name, cut_or_restore_host, "node")
    add("preempt", preempt_job).add_argument("job", nargs="?", help="id of the job to preempt (all hosts)")
    add("requeue", requeue_job, "job")
    return top


def main(arguments: list[str]) -> None:
    """Carry out one verb of `python -m slurm cluster`. Raises UserError."""
    given = make_parser().parse_args(arguments)
    given.is_chosen = not given.name
    if not given.name:
        chosen = None if given.function is start_cluster else choose_running_cluster()
        given.name = chosen.plan.name if chosen else DEFAULT
    if os.environ.get("SLURM_CONF") == str(find_cluster_folder(given.name) / "slurm.conf"):
        raise UserError(
            f"this is inside cluster {given.name}, where its processes look different; leave its shell first"
        )
    os.environ["PATH"] = slurm_conf.make_search_path()  # ip, slurmctld and slurmd are administrators' programs
    given.function(given)
