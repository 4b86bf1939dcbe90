"""Processes, namespaces and cables: how one machine becomes several hosts. Independent of SLURM.

A host is a process with its own network, mounts, host name and process table. All hosts are processes in the process
table of the controller, so they all end with its first process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from common.core.errors import UserError, exit_on_user_error
from common.core.processes import Process

NAMESPACE_FLAGS = {"user": 0x10000000, "pid": 0x20000000, "net": 0x40000000, "uts": 0x04000000, "mnt": 0x00020000}
"""CLONE_NEW* of linux/sched.h; the names are those of /proc/PID/ns."""

# MS_* of linux/mount.h
NOSUID = 0x2
NODEV = 0x4
NOEXEC = 0x8
BIND = 0x1000
RECURSIVE = 0x4000
PRIVATE = 0x40000

FIRST_FREE_FD = 3  # after stdin, stdout and stderr
MAX_FD = 1 << 16
POLL_SECONDS = 2.0
LIBC = ctypes.CDLL(None, use_errno=True)
USER_REMEDY = (
    "this system does not allow ordinary users to create namespaces; on Ubuntu 24.04:"
    " sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or run this as root"
)
ROOT_REMEDY = "root is not allowed to create namespaces here; if this is a container, start it with --privileged"


def call_libc(name: str, *arguments: object) -> None:
    """Call a function of libc. Raises OSError with its name."""
    if getattr(LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def unshare_namespaces(*kinds: str) -> None:
    """Move to new namespaces of these kinds. Raises UserError if the system refuses."""
    try:
        call_libc("unshare", sum(NAMESPACE_FLAGS[kind] for kind in kinds))
    except OSError as error:
        remedy = USER_REMEDY if os.getuid() or "user" in kinds or is_single_user() else ROOT_REMEDY
        raise UserError(f"{remedy} ({error.strerror})") from None


def is_single_user() -> bool:
    """Check whether uid 0 here is one ordinary user outside."""
    return Path("/proc/self/uid_map").read_text().split()[2] == "1"


def check_user(uid: int) -> str:
    """Return the name of the user that all daemons and jobs run as. Raises UserError."""
    if uid == 0 and is_single_user():
        raise UserError(
            "root of this user namespace is an ordinary user outside, which SLURM rejects; run this as that user"
        )
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        raise UserError(f"user {uid} has no name in /etc/passwd, which SLURM needs; run this as a named user") from None


def become_root(uid: int, gid: int) -> None:
    """Become root of a new user namespace with one user, the caller. Raises UserError."""
    unshare_namespaces("user")
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError as error:
        raise UserError(f"{USER_REMEDY} ({error.strerror})") from None


def enter_namespaces(pid: int) -> None:
    """Join the namespaces of a process. The process table changes for children only."""
    namespace_fds = []
    for kind in NAMESPACE_FLAGS:
        namespace = Path(f"/proc/{pid}/ns/{kind}")
        if namespace.readlink() != Path(f"/proc/self/ns/{kind}").readlink():
            namespace_fds.append(os.open(namespace, os.O_RDONLY | os.O_CLOEXEC))
    for namespace_fd in namespace_fds:
        call_libc("setns", namespace_fd, 0)
        os.close(namespace_fd)


def fork_child(function: Callable[[], object]) -> int:
    """Fork a child that runs `function` and exits, with 0 if it returned. Returns the child's pid."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        with exit_on_user_error():
            function()
        status = 0
    except SystemExit as error:
        status = int(error.code or 0)
    except BaseException:  # noqa: BLE001 (a forked child must never return into its parent's code)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait_for_child(pid: int) -> int:
    """Wait for a child; returns its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_in_namespaces(holder: Process, function: Callable[[], object]) -> int:
    """Run `function` as root of the cluster whose first process is `holder`; returns its exit status."""

    def enter_and_run() -> None:
        enter_namespaces(holder.pid)
        sys.exit(wait_for_child(fork_child(function)))

    return wait_for_child(fork_child(enter_and_run))


def detach_process(log: Path, keep: socket.socket | None = None) -> None:
    """Detach from the caller's terminal, folder and files except the socket `keep`; write to `log`."""
    os.setsid()
    os.chdir("/")
    os.umask(0o022)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    first_fd = FIRST_FREE_FD
    if keep:
        os.closerange(FIRST_FREE_FD, keep.fileno())
        first_fd = keep.fileno() + 1
    os.closerange(first_fd, MAX_FD)


def serve_as_init(is_needed: Callable[[], bool]) -> None:
    """Run as the first process of a process table while `is_needed`, so that no child stays a zombie."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:  # children that ended earlier
            pass
    while is_needed():
        time.sleep(POLL_SECONDS)


def mount_path(source: str, target: str, kind: str | None, flags: int) -> None:
    """Mount a file system. Raises UserError."""
    try:
        call_libc("mount", source.encode(), target.encode(), kind.encode() if kind else None, flags, None)
    except OSError as error:
        remedy = USER_REMEDY if is_single_user() else ROOT_REMEDY
        raise UserError(f"{remedy} (mount {target}: {error.strerror})") from None


def make_mounts(etc: Path | None = None) -> None:
    """Make mounts of this namespace only, with its own /proc, and with the files of `etc`, if any, in /etc.

    Without `etc` the namespace is that of a host, which gets its own shared memory.
    """
    mount_path("none", "/", None, RECURSIVE | PRIVATE)
    mount_path("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
    if not etc:
        if Path("/dev/shm").is_dir():  # noqa: S108
            mount_path("none", "/dev/shm", "tmpfs", NOSUID | NODEV)  # noqa: S108 (hosts share no memory)
        return
    for file in sorted(etc.iterdir()):
        target = Path("/etc", file.name).resolve()
        if target.exists():
            mount_path(str(file), str(target), None, BIND)
    if Path("/run/nscd").is_dir():  # the machine's name cache would answer before these files
        mount_path("none", "/run/nscd", "tmpfs", NOSUID | NODEV)


def run_ip(*lines: str) -> None:
    """Run commands of ip(8), in one process. Raises UserError."""
    batch = "\n".join(lines)
    process = subprocess.run(["ip", "-batch", "-"], input=batch, capture_output=True, text=True, check=False)
    if process.returncode:
        raise UserError(f"ip: {process.stderr.splitlines()[0]} ({'; '.join(lines)})")


def list_cables() -> dict[str, bool]:
    """Return whether each cable at the switch is connected, by host."""
    process = subprocess.run(["ip", "-json", "link"], capture_output=True, text=True, check=True)
    cables = [link for link in json.loads(process.stdout) if "link_netnsid" in link]
    return {cable["ifname"]: "UP" in cable["flags"] for cable in cables}


def create_host(name: str, bridge: str, record: Path, run_host: Callable[[socket.socket], None]) -> None:
    """Create a host: its first process, which calls `run_host`, its cable, and its record. Raises UserError.

    `run_host` gets a socket, on which it sends a byte once it has a network and receives one once the cable is
    connected.
    """
    socket_here, socket_of_host = socket.socketpair()
    unshare_namespaces("pid")

    def start_first_process() -> None:
        socket_here.close()
        unshare_namespaces("net", "uts", "mnt")
        run_host(socket_of_host)

    pid = fork_child(start_first_process)
    socket_of_host.close()
    if not socket_here.recv(1):  # it exited before it had a network
        raise UserError(f"{name} did not start")
    # By path, as `ip` runs in the new process table, where the pid has no meaning.
    run_ip(f"link add {name} type veth peer name eth0 netns /proc/{pid}/ns/net", f"link set {name} master {bridge} up")
    Process.identify(pid).save(record)
    socket_here.send(b".")
