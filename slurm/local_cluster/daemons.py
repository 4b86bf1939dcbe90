"""What happens inside a cluster: the controller and the hosts start, lose their cable, lose their power.

Every function here runs as root of the cluster's namespaces, except `create`, which makes them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from common.core.errors import UserError
from slurm.local_cluster import namespaces
from slurm.local_cluster.slurm_conf import CONTROLLER, Plan, address, host

BRIDGE = "switch"


def create(plan: Plan) -> None:
    """Start a cluster. On return its first process is recorded and goes on by itself."""

    def ancestor() -> None:
        if plan.uid:
            namespaces.become_root(plan.uid, plan.gid)
        namespaces.unshare("pid")
        pid = namespaces.child(lambda: controller(plan))
        namespaces.Process.of(pid).save(plan.folder / "holder")

    status = namespaces.exit_status(namespaces.child(ancestor))
    if status:
        raise SystemExit(status)  # it has said why


def controller(plan: Plan) -> None:
    """The first process of the cluster: the switch, the services, slurmctld, then the hosts."""
    namespaces.detach(plan.folder / "log" / "ctl.log")
    namespaces.unshare("net", "uts", "mnt")
    namespaces.mounts(plan.folder / "etc")
    socket.sethostname("ctl")
    up, addr = f"link set {BRIDGE} up", f"addr add {CONTROLLER}/24 dev {BRIDGE}"
    namespaces.ip("link set lo up", f"link add {BRIDGE} type bridge", addr, up)
    if plan.auth == "munge":
        munge(plan)
    if plan.database:
        database(plan)
    daemon(plan, "slurmctld")
    wait("slurmctld", CONTROLLER, 16817)  # a slurmd that finds nobody would try again a second later
    for number in range(1, plan.nodes + 1):
        if namespaces.exit_status(namespaces.child(lambda number=number: start_host(plan, number))):  # type: ignore[misc]
            raise UserError(f"{host(number)} did not start")
    namespaces.rest((plan.folder / "holder").exists)  # a cluster whose folder was deleted could not be found any more


def start_host(plan: Plan, number: int) -> None:
    """Plug a host in and switch it on. Called in a process to be thrown away."""
    name = host(number)

    def first(other_end: socket.socket) -> None:
        namespaces.detach(plan.folder / "log" / f"{name}.log", keep=other_end)
        namespaces.mounts()
        other_end.send(b".")
        if not other_end.recv(1):  # nobody plugged us in
            return
        other_end.close()
        socket.sethostname(name)
        up, route = "link set eth0 up", f"route add default via {CONTROLLER}"
        namespaces.ip("link set lo up", f"addr add {address(number)}/24 dev eth0", up, route)
        daemon(plan, "slurmd", "-N", name)
        namespaces.rest(lambda: True)

    namespaces.plug_host(name, BRIDGE, record(plan, number), first)


def record(plan: Plan, number: int) -> Path:
    """Where a host's first process is noted, by its number in the cluster's process table."""
    return plan.folder / "hosts" / host(number)


def as_caller(plan: Plan) -> list[str]:
    """What turns the root of an ordinary user's namespace back into that user.

    The daemons, told that they are root, would ask for rights that the namespace cannot give.
    """
    if not plan.uid:
        return []
    return ["unshare", "--user", f"--map-user={plan.uid}", f"--map-group={plan.gid}", "--"]


def surroundings(plan: Plan) -> dict[str, str]:
    """A daemon's environment: none of the caller's secrets."""
    return {"HOME": "/", "LC_ALL": "C.UTF-8"} | plan.environment


def daemon(plan: Plan, *argv: str) -> None:
    """Start a program that goes to the background by itself."""
    done = subprocess.run([*as_caller(plan), *argv], env=surroundings(plan), stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise UserError(f"{argv[0]} ended with status {done.returncode}")


def munge(plan: Plan) -> None:
    """A private munged; its socket lies in the folder that all hosts share."""
    run = plan.folder / "run"
    key = run / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    files = {"socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={run}/munge.{ending}" for option, ending in files.items()]
    daemon(plan, "munged", "--force", f"--key-file={key}", *options)


def database(plan: Plan) -> None:
    """A private MariaDB with slurmdbd on top: in memory, and without a password, as nobody else reaches it."""
    namespaces.mount("none", str(plan.folder / "db"), "tmpfs", namespaces.NOSUID | namespaces.NODEV)
    folder, log = plan.folder, (plan.folder / "log" / "db.log").open("a")
    common = ["--no-defaults", f"--datadir={folder}/db", f"--user={plan.user}"]
    speed = ["--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900"]
    address = ["--bind-address=127.0.0.1", "--port=13306", f"--socket={folder}/run/db.sock"]
    install = ["mariadb-install-db", *common, "--skip-test-db", "--auth-root-authentication-method=normal"]
    files = [f"--pid-file={folder}/run/db.pid", "--skip-grant-tables", "--skip-log-bin"]
    as_user, env = as_caller(plan), surroundings(plan)
    done = subprocess.run([*as_user, *install], env=env, stdout=log, stderr=log, check=False)
    if done.returncode:
        raise UserError(f"mariadb-install-db ended with status {done.returncode}")
    argv = [*as_user, "mariadbd", *common, *address, *speed, *files]
    subprocess.Popen(argv, env=env, stdout=log, stderr=log)
    wait("mariadbd", "127.0.0.1", 13306)
    daemon(plan, "slurmdbd")
    wait("slurmdbd", CONTROLLER, 16819)
    daemon(plan, "sacctmgr", "--immediate", "add", "cluster", plan.name)


def wait(name: str, address: str, port: int, seconds: float = 20) -> None:
    """Until a service listens."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            socket.create_connection((address, port), timeout=1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise UserError(f"{name} does not listen after {seconds:.0f} s")


def running_host(plan: Plan, number: int) -> namespaces.Process:
    """The first process of a host; UserError if the host is off."""
    process = namespaces.Process.load(record(plan, number))
    if not process:
        raise UserError(f"{host(number)} is powered off; python -m slurm cluster power-on {number}")
    return process


def cut(plan: Plan, number: int) -> None:
    """Pull a host's cable. Its processes go on."""
    running_host(plan, number)
    namespaces.ip(f"link set {host(number)} down")


def join(plan: Plan, number: int) -> None:
    """Plug a host's cable in again.

    SLURM asks a host that is down only in every 20th round, so taking it back lasts up to seven times
    SlurmdTimeout; `exec scontrol update nodename=nodeN state=resume` makes it ask at once.
    """
    running_host(plan, number)
    namespaces.ip(f"link set {host(number)} up")


def power_off(plan: Plan, number: int) -> None:
    """End a host at once. Its cable goes first: dying processes would still say goodbye to their peers."""
    process = running_host(plan, number)
    namespaces.ip(f"link set {host(number)} down")
    namespaces.ip(f"link del {host(number)}")  # before the host's end goes with its last process, and this one with it
    process.kill()


def power_on(plan: Plan, number: int) -> None:
    """Start a host that is off."""
    if namespaces.Process.load(record(plan, number)):
        raise UserError(f"{host(number)} is on")
    start_host(plan, number)


VERBS: dict[str, Callable[[Plan, int], None]] = {"cut": cut, "join": join, "power-off": power_off, "power-on": power_on}


def print_hosts(plan: Plan, states: dict[str, str]) -> None:
    """A table: each host's address, its cable (in, cut, or off without power), and what SLURM thinks of it."""
    plugged = namespaces.cables()
    print(f"{'HOST':10}{'ADDRESS':14}{'CABLE':8}SLURM")
    for number in range(1, plan.nodes + 1):
        name = host(number)
        cable = ("in" if plugged.get(name) else "cut") if namespaces.Process.load(record(plan, number)) else "off"
        print(f"{name:10}{address(number):14}{cable:8}{states.get(name, 'unknown')}")
