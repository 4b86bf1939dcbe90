"""Real SLURM cluster on one machine, with real daemons and with hosts that have their own names and addresses.

    python -m slurm cluster up [--nodes 2] [--cpus N] [--rate 200mbit] [--delay 5ms] [--db] [--conf Key=Value ...]
    python -m slurm cluster status | shell | exec CMD... | node N CMD... | down
    python -m slurm cluster cut N | join N | power-off N | power-on N | preempt [JOB] | requeue JOB

The cluster requires Linux and the Debian or Ubuntu packages slurm-wlm and iproute2. It requires neither
root access nor changes to the machine. The controller is named `ctl`, and the hosts are named `node1`, `node2`,
and so on. All hosts share the files of the machine. The hosts can reach each other, but not the internet. Jobs
run as the calling user. The default partition is `main`. Jobs in partition `high` preempt jobs in `main`.
Every verb accepts --name NAME. Clusters with different names are independent of each other.

`--conf` sets a line of slurm.conf, such as KillWait=30, SlurmdTimeout=10, or
SlurmctldParameters=preempt_send_user_signal. GraceTime=5 applies to partition `main`. All files of a cluster
are in one folder. The parent of this folder is CLUSTER_DIR if this variable is set, else XDG_RUNTIME_DIR,
else /tmp.
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

from common.system.errors import UserError
from common.system.processes import Process
from common.system.text import format_count
from slurm.arguments import parse_count, parse_zero_or_one
from slurm.local_cluster import cables, daemons, slurm_conf
from slurm.local_cluster.cables import Shape
from slurm.local_cluster.cluster import (
    DEFAULT_NAME,
    Cluster,
    choose_running_cluster,
    find_cluster_folder,
    find_running_cluster,
    list_running_clusters,
    require_running_cluster,
)
from slurm.local_cluster.namespaces import look_up_daemon_user_name
from slurm.local_cluster.slurm_conf import Plan

MAX_CPUS = 1024
POLL_SECONDS = 0.02


@contextlib.contextmanager
def lock_cluster_folder(name: str) -> Iterator[Path]:
    """Create and lock the state folder of a cluster.

    Raises UserError if the folder is not writable or belongs to another user.
    """
    folder = slurm_conf.check_cluster_folder(find_cluster_folder(name))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; set CLUSTER_DIR to a writable folder") from None
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise UserError(f"{folder} belongs to another user; set CLUSTER_DIR to another folder")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def start_cluster(args: argparse.Namespace) -> None:
    """Start a cluster, and wait until all hosts of the cluster are idle."""
    nodes = parse_count("NODES", args.nodes or "2", slurm_conf.MAX_NODES)
    cpus = parse_count("--cpus", args.cpus or str(max(2, os.cpu_count() or 1)), MAX_CPUS)
    settings = slurm_conf.parse_slurm_conf_settings(args.conf)
    database = parse_zero_or_one("DB", args.db)
    shape = cables.parse_rate_and_delay(args.rate, args.delay)
    auth = args.auth or slurm_conf.choose_auth()
    slurm_conf.check_programs(auth, database)
    cables.check_shaping_support(shape)
    user = look_up_daemon_user_name(os.getuid())
    with lock_cluster_folder(args.name) as folder:
        running = find_running_cluster(args.name)
        if running:
            check_running_cluster_matches(running.plan, nodes if args.nodes else running.plan.nodes, shape)
            check_running_cluster_has(running.plan, args)
            print(f"cluster {args.name} is already up")
            return
        start = time.monotonic()
        record = folder / "first_job"
        last_job = int(record.read_text()) if record.exists() else 0
        first_job = slurm_conf.choose_first_job_id(last_job, time.time())
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
        ids = (os.getuid(), os.getgid())
        plan = Plan(args.name, folder, nodes, cpus, memory, user, *ids, auth, database, first_job, settings, *shape)
        slurm_conf.write_cluster_files(plan)
        daemons.fork_cluster(plan)
        try:
            wait_until_hosts_are_idle(plan)
        except BaseException:  # including Ctrl-C, because a partly started cluster is useless
            kill_cluster_processes(folder)
            raise
    hosts = f"{format_count(nodes, 'host')} with {format_count(cpus, 'CPU')} each"
    if any(shape):
        hosts += f", cables {shape.describe()}"
    print(f"cluster {args.name} is up: {hosts}, idle after {time.monotonic() - start:.1f} s")


def check_running_cluster_matches(plan: Plan, nodes: int, shape: Shape) -> None:
    """Raise UserError if the number of hosts or the cables of a running cluster differ from those requested."""
    running_shape = Shape(plan.rate, plan.delay)
    if nodes == plan.nodes and (not any(shape) or shape == running_shape):
        return
    properties = f"NODES={plan.nodes}"
    if any(shape) or any(running_shape):
        properties += f" and cables {running_shape.describe()}"
    setting = "" if plan.name == DEFAULT_NAME else f" NAME={plan.name}"
    raise UserError(f"cluster {plan.name} is already up with {properties}; stop it first: make cluster-down{setting}")


def check_running_cluster_has(plan: Plan, args: argparse.Namespace) -> None:
    """Raise UserError if a running cluster lacks properties that the command line requests."""
    missing_settings = slurm_conf.parse_slurm_conf_settings(args.conf).items() - plan.settings.items()
    requested = {
        "DB=1": parse_zero_or_one("DB", args.db) and not plan.database,
        f"--cpus={args.cpus}": args.cpus and int(args.cpus) != plan.cpus,
        f"--auth={args.auth}": args.auth and args.auth != plan.auth,
        " ".join(f"--conf={key}={value}" for key, value in sorted(missing_settings)): missing_settings,
    }
    setting = "" if plan.name == DEFAULT_NAME else f" NAME={plan.name}"
    for text, is_missing in requested.items():
        if is_missing:
            raise UserError(
                f"cluster {plan.name} is already up without {text}; stop it first: make cluster-down{setting}"
            )


def wait_until_hosts_are_idle(plan: Plan) -> None:
    """Wait until all hosts of a cluster are idle.

    Raises UserError, with the error message of a daemon, if the cluster does not start in time.
    """
    timeout = 30 + plan.nodes
    if plan.database:
        timeout += 30
    deadline = time.monotonic() + timeout
    last_host = daemons.locate_host_process_record(plan, plan.nodes)
    sinfo = ("sinfo", "--noheader", "--partition=main", "--states=idle", "--responding", "--format=%D")
    while time.monotonic() < deadline:
        cluster = find_running_cluster(plan.name)
        if not cluster:
            break
        # If sinfo is called before the last host has started, sinfo sleeps for a second.
        if last_host.exists() and cluster.run(*sinfo, check=False) == str(plan.nodes):
            return
        time.sleep(POLL_SECONDS)
    raise UserError(
        f"cluster {plan.name} did not start: {find_startup_error(plan.folder / 'log')}; see {plan.folder}/log"
    )


def find_startup_error(logs: Path) -> str:
    """Return the logged error that ended a daemon, else the error that kept the cluster from starting."""
    lines: list[str] = []
    for log in sorted(logs.glob("*.log")):
        lines += log.read_text(errors="replace").splitlines()
    for mark, prefix in (("Parsing error", ": error: "), ("fatal: ", "fatal: ")):
        for line in lines:
            if mark in line:
                return line.rpartition(prefix)[2]
    for line in lines:
        if line.startswith("error: "):
            return line.removeprefix("error: ")
    return "the hosts did not become idle in time"


def kill_cluster_processes(folder: Path) -> None:
    """Stop the cluster whose state folder is `folder`, if it is running."""
    process = Process.load(folder / "holder")
    if process:
        process.kill()
    (folder / "holder").unlink(missing_ok=True)


def stop_cluster(args: argparse.Namespace) -> None:
    """Stop a cluster. The logs of the cluster are kept until the next `up`."""
    if not find_running_cluster(args.name):
        if args.has_default_name:
            print(f"cluster {args.name} is not up")
            return
        names = list_running_clusters()
        running = f"running clusters: {', '.join(names)}" if names else "no cluster is up"
        raise UserError(f"cluster {args.name} is not up; {running}")
    with lock_cluster_folder(args.name) as folder:
        kill_cluster_processes(folder)
        for name in set(slurm_conf.FOLDERS) - {"log"}:
            shutil.rmtree(folder / name, ignore_errors=True)
    print(f"cluster {args.name} is down; the logs are in {folder}/log")


def print_status(args: argparse.Namespace) -> None:
    """Print the folder of a cluster, the pid of its first process, and the state of each host."""
    cluster = require_running_cluster(args.name)
    plan = cluster.plan
    print(f"cluster {plan.name} is up: first process {cluster.process.pid}, files in {plan.folder}", flush=True)
    lines = cluster.run("sinfo", "-h", "-p", "main", "-N", "-o", "%N %T").splitlines()
    states = dict(line.split() for line in lines)
    cluster.run_as_root(lambda: daemons.print_hosts(plan, states))


def exec_in_cluster(args: argparse.Namespace) -> None:
    """Run a command inside a cluster, in the current folder. The command replaces the calling process."""
    cluster = require_running_cluster(args.name)
    number = parse_host(cluster, args.node) if args.verb == "node" else 0
    if number:
        cluster.run_as_root(lambda: daemons.find_running_host_process(cluster.plan, number))
    argv = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.verb == "shell":
        argv = [os.environ.get("SHELL", "/bin/sh")]
        programs = "sbatch, srun, squeue, and sinfo"
        print(f"shell on the controller of cluster {args.name} with {programs}; type exit to leave", file=sys.stderr)
    if not argv:
        raise UserError(f"{args.verb}: the command is missing; run, for example, exec sinfo")
    command = cluster.build_command(argv, node=number)
    os.execvp(command[0], command)


def parse_host(cluster: Cluster, text: str) -> int:
    """Parse the number of a host, written as `2` or `node2`. Raises UserError."""
    return parse_count("N", text.removeprefix("node"), cluster.plan.nodes)


def cut_or_restore_host(args: argparse.Namespace) -> None:
    """Connect or disconnect the cable or power of a host."""
    cluster = require_running_cluster(args.name)
    number = parse_host(cluster, args.node)
    cluster.run_as_root(lambda: daemons.VERBS[args.verb](cluster.plan, number))
    print(f"{args.verb}: {slurm_conf.format_host_name(number)}")


def preempt_job(args: argparse.Namespace) -> None:
    """Preempt one job or all jobs by submitting a short high-priority job to their hosts."""
    cluster = require_running_cluster(args.name)
    if args.job:
        nodes = cluster.run("squeue", "--noheader", "--states=running", f"--jobs={args.job}", "--format=%N")
        problem = f"job {args.job} is not running"
    else:
        ready = ("--states=idle,mixed,allocated", "--responding", "--format=%N")
        nodes = cluster.run("sinfo", "--noheader", "--partition=main", *ready).replace("\n", ",")
        problem = "no host is ready to run a job"
    if not nodes:
        raise UserError(problem)
    options = ["--parsable", "--partition=high", "--exclusive", "--job-name=preempt", "--output=/dev/null", "--time=1"]
    count = len(cluster.run("scontrol", "show", "hostnames", nodes).splitlines())
    job = cluster.run("sbatch", *options, f"--nodes={count}", f"--nodelist={nodes}", "--wrap=sleep 2")
    print(f"job {job} in partition high requests {nodes}")


def requeue_job(args: argparse.Namespace) -> None:
    """Put a running job back in the queue, as an administrator can do."""
    require_running_cluster(args.name).run("scontrol", "requeue", args.job)


POSITIONALS = {
    "node": "number or name of the host, such as 2 or node2",
    "command": "command and its arguments",
    "job": "id of the job",
}


def describe_verb(function: Callable[..., object]) -> str:
    """Return the first line of a function's docstring for help texts, without the sentence about errors."""
    first_line = (function.__doc__ or "").partition("\n")[0]
    return first_line.partition(" Raises ")[0]


def make_parser() -> argparse.ArgumentParser:
    """Create the parser of all verbs of `python -m slurm cluster`."""
    top = argparse.ArgumentParser(
        prog="python -m slurm cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")

    def add_verb(
        verb: str, function: Callable[[argparse.Namespace], None], *positionals: str
    ) -> argparse.ArgumentParser:
        description = describe_verb(daemons.VERBS.get(verb, function))
        parser = verbs.add_parser(verb, help=description, description=description)
        default_name = DEFAULT_NAME if verb == "up" else f"{DEFAULT_NAME}, else the only cluster that is up"
        parser.add_argument("--name", default="", help=f"name of the cluster (default: {default_name})")
        parser.set_defaults(function=function)
        for name in positionals:
            nargs = argparse.REMAINDER if name == "command" else None
            parser.add_argument(name, nargs=nargs, help=POSITIONALS[name])
        return parser

    up = add_verb("up", start_cluster)
    up.add_argument("--nodes", default="", help=f"number of hosts, from 1 to {slurm_conf.MAX_NODES} (default: 2)")
    cpus_help = "number of CPUs that each host reports to SLURM (default: CPUs of the machine, but at least 2)"
    up.add_argument("--cpus", default="", help=cpus_help)
    rate_help = "data rate of each cable in each direction, such as 200mbit (default: unlimited)"
    up.add_argument("--rate", default="", help=rate_help)
    up.add_argument("--delay", default="", help="delay of each cable in each direction, such as 5ms (default: none)")
    up.add_argument("--db", nargs="?", const="1", default="", help="record jobs in a private MariaDB database")
    up.add_argument("--conf", action="append", default=[], metavar="Key=Value", help="line to set in slurm.conf")
    auth_help = "authentication method (default: none if SLURM was built with it, else munge)"
    up.add_argument("--auth", choices=("none", "munge"), help=auth_help)
    add_verb("down", stop_cluster)
    add_verb("status", print_status)
    add_verb("shell", exec_in_cluster).set_defaults(command=[])
    add_verb("exec", exec_in_cluster, "command")
    add_verb("node", exec_in_cluster, "node", "command")
    for verb in daemons.VERBS:
        add_verb(verb, cut_or_restore_host, "node")
    add_verb("preempt", preempt_job).add_argument("job", nargs="?", help="id of the job to preempt (default: all jobs)")
    add_verb("requeue", requeue_job, "job")
    return top


def main(arguments: list[str]) -> None:
    """Execute one verb of `python -m slurm cluster`. Raises UserError."""
    args = make_parser().parse_args(arguments)
    args.has_default_name = not args.name
    if not args.name:
        running = None if args.verb == "up" else choose_running_cluster()
        args.name = running.plan.name if running else DEFAULT_NAME
    if os.environ.get("SLURM_CONF") == str(find_cluster_folder(args.name) / "slurm.conf"):
        raise UserError(
            f"this shell is inside cluster {args.name}, which has its own process ids; exit the shell first"
        )
    os.environ["PATH"] = slurm_conf.make_search_path()  # includes the folders of ip, slurmctld, and slurmd
    args.function(args)
