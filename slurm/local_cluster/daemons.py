"""Functions that start the daemons of a local cluster and that disconnect the cable or power of a host.

All functions except `fork_cluster` run as root in the namespaces of the cluster. `fork_cluster` creates the namespaces.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from common.system.errors import UserError
from common.system.processes import Process
from slurm.local_cluster import cables, namespaces
from slurm.local_cluster.cables import Shape
from slurm.local_cluster.slurm_conf import (
    CONTROLLER_ADDRESS,
    CONTROLLER_PORT,
    DATABASE_DAEMON_PORT,
    DATABASE_PORT,
    Plan,
    format_host_address,
    format_host_name,
)

BRIDGE = "switch"
PORT_TIMEOUT = 20.0  # maximum time, in seconds, for a service to start listening on its port


def fork_cluster(plan: Plan) -> None:
    """Start the first process of a cluster in the background, and record the pid of the process."""

    def start_first_process() -> None:
        if plan.uid:
            namespaces.become_root_in_new_namespace(plan.uid, plan.gid)
        namespaces.unshare_namespaces("pid")
        pid = namespaces.fork_child(lambda: run_first_process(plan))
        Process.identify(pid).save(plan.folder / "holder")

    status = namespaces.wait_for_child(namespaces.fork_child(start_first_process))
    if status:
        raise SystemExit(status)  # the child has already printed the reason


def run_first_process(plan: Plan) -> None:
    """Start the switch, slurmctld, and the hosts as the first process of the cluster. Raises UserError."""
    namespaces.detach_process(plan.folder / "log" / "ctl.log")
    namespaces.unshare_namespaces("net", "uts", "mnt")
    namespaces.create_private_mounts(plan.folder / "etc")
    socket.sethostname("ctl")
    namespaces.run_ip(
        "link set lo up",
        f"link add {BRIDGE} type bridge",
        f"addr add {CONTROLLER_ADDRESS}/24 dev {BRIDGE}",
        f"link set {BRIDGE} up",
    )
    if plan.auth == "munge":
        start_munge(plan)
    if plan.database:
        start_database(plan)
    start_daemon(plan, "slurmctld")
    # If slurmd is started before slurmctld, slurmd waits a second before it tries to connect again.
    wait_for_port("slurmctld", CONTROLLER_ADDRESS, CONTROLLER_PORT)
    for number in range(1, plan.nodes + 1):
        child = namespaces.fork_child(lambda number=number: start_host(plan, number))  # type: ignore[misc]
        if namespaces.wait_for_child(child):
            raise UserError(f"{format_host_name(number)} did not start")
    record = plan.folder / "holder"
    namespaces.serve_as_init(record.exists)  # the cluster ends if the record is deleted


def start_host(plan: Plan, number: int) -> None:
    """Start a host and connect its cable. The calling process must exit afterward."""
    name = format_host_name(number)
    shape = Shape(plan.rate, plan.delay)

    def run_host(other_end: socket.socket) -> None:
        namespaces.detach_process(plan.folder / "log" / f"{name}.log", keep=other_end)
        namespaces.create_private_mounts()
        other_end.send(b".")
        if not other_end.recv(1):  # the cable was not connected
            return
        other_end.close()
        socket.sethostname(name)
        namespaces.run_ip(
            "link set lo up",
            f"addr add {format_host_address(number)}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {CONTROLLER_ADDRESS}",
        )
        cables.shape_device("eth0", shape)
        start_daemon(plan, "slurmd", "-N", name)
        namespaces.serve_as_init(lambda: True)

    namespaces.create_host(name, BRIDGE, locate_host_process_record(plan, number), run_host)
    cables.shape_device(name, shape)


def locate_host_process_record(plan: Plan, number: int) -> Path:
    """Return the path of the file that records the first process of a host.

    The file contains the pid that the process has inside the cluster.
    """
    return plan.folder / "hosts" / format_host_name(number)


def make_caller_prefix(plan: Plan) -> list[str]:
    """Return a command prefix that executes a program as the user who started the cluster.

    Inside the cluster, this user is mapped to root. Daemons run as root would request rights that the namespace lacks.
    """
    if not plan.uid:
        return []
    return ["unshare", "--user", f"--map-user={plan.uid}", f"--map-group={plan.gid}", "--"]


def make_daemon_environment(plan: Plan) -> dict[str, str]:
    """Return the environment of a daemon, without secrets from the caller's environment."""
    return {"HOME": "/", "LC_ALL": "C.UTF-8"} | plan.environment


def start_daemon(plan: Plan, *argv: str) -> None:
    """Start a program that moves itself to the background. Raises UserError if the program fails."""
    command = [*make_caller_prefix(plan), *argv]
    environment = make_daemon_environment(plan)
    process = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False)
    if process.returncode:
        raise UserError(f"{argv[0]} exited with status {process.returncode}")


def start_munge(plan: Plan) -> None:
    """Start a private MUNGE daemon (munged). All hosts share the folder of the daemon's socket."""
    run = plan.folder / "run"
    key = run / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    suffixes = {"socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={run}/munge.{suffix}" for option, suffix in suffixes.items()]
    start_daemon(plan, "munged", "--force", f"--key-file={key}", *options)


def start_database(plan: Plan) -> None:
    """Start slurmdbd and a private MariaDB server. Raises UserError.

    The server keeps its data in memory and requires no password.
    """
    folder = plan.folder
    namespaces.mount_path("none", str(folder / "db"), "tmpfs", namespaces.NOSUID | namespaces.NODEV)
    log = (folder / "log" / "db.log").open("a")
    prefix = make_caller_prefix(plan)
    environment = make_daemon_environment(plan)

    common = ["--no-defaults", f"--datadir={folder}/db", f"--user={plan.user}"]
    install = ["mariadb-install-db", *common, "--skip-test-db", "--auth-root-authentication-method=normal"]
    process = subprocess.run([*prefix, *install], env=environment, stdout=log, stderr=log, check=False)
    if process.returncode:
        raise UserError(f"mariadb-install-db exited with status {process.returncode}")

    server = ["mariadbd", *common]
    server += ["--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900"]  # for speed
    server += ["--bind-address=127.0.0.1", f"--port={DATABASE_PORT}", f"--socket={folder}/run/db.sock"]
    server += [f"--pid-file={folder}/run/db.pid", "--skip-grant-tables", "--skip-log-bin"]
    subprocess.Popen([*prefix, *server], env=environment, stdout=log, stderr=log)
    wait_for_port("mariadbd", "127.0.0.1", DATABASE_PORT)
    start_daemon(plan, "slurmdbd")
    wait_for_port("slurmdbd", CONTROLLER_ADDRESS, DATABASE_DAEMON_PORT)
    start_daemon(plan, "sacctmgr", "--immediate", "add", "cluster", plan.name)


def wait_for_port(name: str, address: str, port: int, seconds: float = PORT_TIMEOUT) -> None:
    """Wait until a service listens on a port. Raises UserError after `seconds` seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise UserError(f"{name} is not listening on port {port} after {seconds:.0f} s")


def find_running_host_process(plan: Plan, number: int) -> Process:
    """Return the first process of a host. Raises UserError if the host is powered off."""
    process = Process.load(locate_host_process_record(plan, number))
    if not process:
        name = format_host_name(number)
        raise UserError(f"{name} is powered off; start it with python -m slurm cluster power-on {number}")
    return process


def cut_cable(plan: Plan, number: int) -> None:
    """Disconnect the cable of a host. The processes of the host keep running."""
    find_running_host_process(plan, number)
    namespaces.run_ip(f"link set {format_host_name(number)} down")


def reconnect_cable(plan: Plan, number: int) -> None:
    """Reconnect the cable of a host.

    SLURM contacts a host that is down in only one of 20 ping rounds. SLURM may therefore need up to seven times
    SlurmdTimeout to use the host again. To make SLURM contact the host immediately, run
    `python -m slurm cluster exec scontrol update nodename=nodeN state=resume`.
    """
    find_running_host_process(plan, number)
    namespaces.run_ip(f"link set {format_host_name(number)} up")


def power_off(plan: Plan, number: int) -> None:
    """Stop a host immediately, without closing its network connections.

    The cable is cut first, because terminating processes would otherwise close their connections.
    """
    process = find_running_host_process(plan, number)
    name = format_host_name(number)
    namespaces.run_ip(f"link set {name} down")
    namespaces.run_ip(f"link del {name}")  # otherwise the kernel deletes the cable later, when the last process ends
    process.kill()


def power_on(plan: Plan, number: int) -> None:
    """Start a host that is powered off. Raises UserError if the host is already on."""
    if Process.load(locate_host_process_record(plan, number)):
        raise UserError(f"{format_host_name(number)} is already on")
    start_host(plan, number)


VERBS: dict[str, Callable[[Plan, int], None]] = {
    "cut": cut_cable,
    "join": reconnect_cable,
    "power-off": power_off,
    "power-on": power_on,
}


def print_hosts(plan: Plan, states: dict[str, str]) -> None:
    """Print the address, cable state, rate, delay, and SLURM state of each host.

    The cable state is `in`, `cut`, or, if the host is powered off, `off`.
    """
    is_connected = namespaces.read_cable_states()
    shapes = cables.read_shapes()
    print(f"{'HOST':10}{'ADDRESS':14}{'CABLE':8}{'RATE':14}SLURM")
    for number in range(1, plan.nodes + 1):
        name = format_host_name(number)
        cable = "in" if is_connected.get(name) else "cut"
        if not Process.load(locate_host_process_record(plan, number)):
            cable = "off"
        shape = shapes.get(name, Shape()).describe()
        print(f"{name:10}{format_host_address(number):14}{cable:8}{shape:14}{states.get(name, 'unknown')}")
