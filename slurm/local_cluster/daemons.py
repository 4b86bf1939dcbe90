"""The daemons of a cluster: start of the controller and the hosts, and their loss of cable or power.

Every function here runs as root of the cluster's namespaces, except `fork_cluster`, which makes them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from common.core.errors import UserError
from common.core.processes import Process
from slurm.local_cluster import cables, namespaces
from slurm.local_cluster.cables import Shape
from slurm.local_cluster.slurm_conf import CONTROLLER, Plan, format_host_address, format_host_name

BRIDGE = "switch"


def fork_cluster(plan: Plan) -> None:
    """Start a cluster. On return its first process is recorded and goes on by itself."""

    def start_first_process() -> None:
        if plan.uid:
            namespaces.become_root(plan.uid, plan.gid)
        namespaces.unshare_namespaces("pid")
        pid = namespaces.fork_child(lambda: run_first_process(plan))
        Process.identify(pid).save(plan.folder / "holder")

    status = namespaces.wait_for_child(namespaces.fork_child(start_first_process))
    if status:
        raise SystemExit(status)  # it has said why


def run_first_process(plan: Plan) -> None:
    """Be the first process of the cluster: start the switch, slurmctld, then the hosts. Raises UserError."""
    namespaces.detach_process(plan.folder / "log" / "ctl.log")
    namespaces.unshare_namespaces("net", "uts", "mnt")
    namespaces.make_mounts(plan.folder / "etc")
    socket.sethostname("ctl")
    up, addr = f"link set {BRIDGE} up", f"addr add {CONTROLLER}/24 dev {BRIDGE}"
    namespaces.run_ip("link set lo up", f"link add {BRIDGE} type bridge", addr, up)
    if plan.auth == "munge":
        start_munge(plan)
    if plan.database:
        start_database(plan)
    start_daemon(plan, "slurmctld")
    wait_for_port("slurmctld", CONTROLLER, 16817)  # a slurmd that finds nobody would try again a second later
    for number in range(1, plan.nodes + 1):
        child = namespaces.fork_child(lambda number=number: start_host(plan, number))  # type: ignore[misc]
        if namespaces.wait_for_child(child):
            raise UserError(f"{format_host_name(number)} did not start")
    record = plan.folder / "holder"
    namespaces.serve_as_init(record.exists)  # a cluster whose folder was deleted could not be found any more


def start_host(plan: Plan, number: int) -> None:
    """Plug a host in and switch it on. The calling process ends afterwards."""
    name, shape = format_host_name(number), Shape(plan.rate, plan.delay)

    def run_host(other_end: socket.socket) -> None:
        namespaces.detach_process(plan.folder / "log" / f"{name}.log", keep=other_end)
        namespaces.make_mounts()
        other_end.send(b".")
        if not other_end.recv(1):  # nobody plugged us in
            return
        other_end.close()
        socket.sethostname(name)
        up, route = "link set eth0 up", f"route add default via {CONTROLLER}"
        namespaces.run_ip("link set lo up", f"addr add {format_host_address(number)}/24 dev eth0", up, route)
        cables.shape_device("eth0", shape)
        start_daemon(plan, "slurmd", "-N", name)
        namespaces.serve_as_init(lambda: True)

    namespaces.create_host(name, BRIDGE, locate_process_record(plan, number), run_host)
    cables.shape_device(name, shape)


def locate_process_record(plan: Plan, number: int) -> Path:
    """Return the file that records a host's first process, by its number in the cluster's process table."""
    return plan.folder / "hosts" / format_host_name(number)


def make_caller_prefix(plan: Plan) -> list[str]:
    """Return the command prefix that turns the root of an ordinary user's namespace back into that user.

    The daemons, told that they are root, would ask for rights that the namespace cannot give.
    """
    if not plan.uid:
        return []
    return ["unshare", "--user", f"--map-user={plan.uid}", f"--map-group={plan.gid}", "--"]


def make_daemon_environment(plan: Plan) -> dict[str, str]:
    """Return a daemon's environment: none of the caller's secrets."""
    return {"HOME": "/", "LC_ALL": "C.UTF-8"} | plan.environment


def start_daemon(plan: Plan, *argv: str) -> None:
    """Start a program that goes to the background by itself. Raises UserError."""
    command, environ = [*make_caller_prefix(plan), *argv], make_daemon_environment(plan)
    done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise UserError(f"{argv[0]} ended with status {done.returncode}")


def start_munge(plan: Plan) -> None:
    """Start a private munged; its socket lies in the folder that all hosts share."""
    run = plan.folder / "run"
    key = run / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    files = {"socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={run}/munge.{ending}" for option, ending in files.items()]
    start_daemon(plan, "munged", "--force", f"--key-file={key}", *options)


def start_database(plan: Plan) -> None:
    """Start a private MariaDB with slurmdbd on top: in memory, without a password. Raises UserError."""
    namespaces.mount_path("none", str(plan.folder / "db"), "tmpfs", namespaces.NOSUID | namespaces.NODEV)
    folder, log = plan.folder, (plan.folder / "log" / "db.log").open("a")
    common = ["--no-defaults", f"--datadir={folder}/db", f"--user={plan.user}"]
    speed = ["--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900"]
    address = ["--bind-address=127.0.0.1", "--port=13306", f"--socket={folder}/run/db.sock"]
    install = ["mariadb-install-db", *common, "--skip-test-db", "--auth-root-authentication-method=normal"]
    files = [f"--pid-file={folder}/run/db.pid", "--skip-grant-tables", "--skip-log-bin"]
    as_user, env = make_caller_prefix(plan), make_daemon_environment(plan)
    done = subprocess.run([*as_user, *install], env=env, stdout=log, stderr=log, check=False)
    if done.returncode:
        raise UserError(f"mariadb-install-db ended with status {done.returncode}")
    argv = [*as_user, "mariadbd", *common, *address, *speed, *files]
    subprocess.Popen(argv, env=env, stdout=log, stderr=log)
    wait_for_port("mariadbd", "127.0.0.1", 13306)
    start_daemon(plan, "slurmdbd")
    wait_for_port("slurmdbd", CONTROLLER, 16819)
    start_daemon(plan, "sacctmgr", "--immediate", "add", "cluster", plan.name)


def wait_for_port(name: str, address: str, port: int, seconds: float = 20) -> None:
    """Wait until a service listens. Raises UserError."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            socket.create_connection((address, port), timeout=1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise UserError(f"{name} does not listen after {seconds:.0f} s")


def require_host(plan: Plan, number: int) -> Process:
    """Find the first process of a host. Raises UserError if the host is off."""
    process = Process.load(locate_process_record(plan, number))
    if not process:
        raise UserError(f"{format_host_name(number)} is powered off; python -m slurm cluster power-on {number}")
    return process


def cut_cable(plan: Plan, number: int) -> None:
    """Pull a host's cable. Its processes go on."""
    require_host(plan, number)
    namespaces.run_ip(f"link set {format_host_name(number)} down")


def join_cable(plan: Plan, number: int) -> None:
    """Plug a host's cable in again.

    SLURM asks a host that is down only in every 20th round, so taking it back lasts up to seven times
    SlurmdTimeout; `exec scontrol update nodename=nodeN state=resume` makes it ask at once.
    """
    require_host(plan, number)
    namespaces.run_ip(f"link set {format_host_name(number)} up")


def power_off(plan: Plan, number: int) -> None:
    """End a host at once. Its cable goes first: dying processes would still say goodbye to their peers."""
    process = require_host(plan, number)
    name = format_host_name(number)
    namespaces.run_ip(f"link set {name} down")
    namespaces.run_ip(f"link del {name}")  # before the host's end goes with its last process, and this one with it
    process.kill()


def power_on(plan: Plan, number: int) -> None:
    """Start a host that is off. Raises UserError."""
    if Process.load(locate_process_record(plan, number)):
        raise UserError(f"{format_host_name(number)} is on")
    start_host(plan, number)


VERBS: dict[str, Callable[[Plan, int], None]] = {
    "cut": cut_cable,
    "join": join_cable,
    "power-off": power_off,
    "power-on": power_on,
}


def print_hosts(plan: Plan, states: dict[str, str]) -> None:
    """Print each host's address, its cable (in, cut, or off without power) and what it carries, and its SLURM state."""
    plugged, shapes = namespaces.list_cables(), cables.read_shapes()
    print(f"{'HOST':10}{'ADDRESS':14}{'CABLE':8}{'RATE':14}SLURM")
    for number in range(1, plan.nodes + 1):
        name = format_host_name(number)
        cable = ("in" if plugged.get(name) else "cut") if Process.load(locate_process_record(plan, number)) else "off"
        shape = shapes.get(name, Shape()).describe()
        print(f"{name:10}{format_host_address(number):14}{cable:8}{shape:14}{states.get(name, 'unknown')}")
