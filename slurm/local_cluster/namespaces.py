"""Processes, namespaces, and cables that simulate several hosts on one machine. This module does not use SLURM.

A host is a process with its own network, mounts, host name, and process table. All hosts are also in the process table
of the controller. Therefore, all hosts end when the first process of the controller ends.
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

from common.system.errors import UserError, exit_on_user_error
from common.system.processes import Process

NAMESPACE_FLAGS = {"user": 0x10000000, "pid": 0x20000000, "net": 0x40000000, "uts": 0x04000000, "mnt": 0x00020000}
"""CLONE_NEW* flags from linux/sched.h, by the name of the namespace in /proc/PID/ns."""

# MS_* flags from linux/mount.h
NOSUID = 0x2
NODEV = 0x4
NOEXEC = 0x8
BIND = 0x1000
RECURSIVE = 0x4000
PRIVATE = 0x40000

FIRST_FREE_FD = 3  # first file descriptor after stdin, stdout, and stderr
MAX_FD = 1 << 16
POLL_SECONDS = 2.0
LIBC = ctypes.CDLL(None, use_errno=True)
USER_REMEDY = (
    "this system does not allow ordinary users to create namespaces; on Ubuntu 24.04, run"
    " sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or run this command as root"
)
ROOT_REMEDY = "root is not allowed to create namespaces here; if this is a container, start it with --privileged"


def call_libc(name: str, *arguments: object) -> None:
    """Call a libc function. If the function fails, raises OSError with the name of the function."""
    if getattr(LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def unshare_namespaces(*kinds: str) -> None:
    """Move this process to new namespaces of these kinds. Raises UserError if the system does not permit it."""
    try:
        call_libc("unshare", sum(NAMESPACE_FLAGS[kind] for kind in kinds))
    except OSError as error:
        remedy = USER_REMEDY if os.getuid() or "user" in kinds or is_single_user_namespace() else ROOT_REMEDY
        raise UserError(f"{remedy} ({error.strerror})") from None


def is_single_user_namespace() -> bool:
    """Return whether this user namespace contains only root, which is mapped to one user of the system."""
    return Path("/proc/self/uid_map").read_text().split()[2] == "1"


def look_up_daemon_user_name(uid: int) -> str:
    """Return the name of the user with this id. All daemons and jobs run as this user. Raises UserError."""
    if uid == 0 and is_single_user_namespace():
        raise UserError(
            "root in this user namespace is actually an ordinary user, which SLURM rejects; run this command as "
            "that user"
        )
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        raise UserError(
            f"user {uid} has no name in /etc/passwd, which SLURM requires; run this command as a named user"
        ) from None


def become_root_in_new_namespace(uid: int, gid: int) -> None:
    """Enter a new user namespace in which the caller is root and the only user. Raises UserError."""
    unshare_namespaces("user")
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError as error:
        raise UserError(f"{USER_REMEDY} ({error.strerror})") from None


def enter_namespaces(pid: int) -> None:
    """Enter the namespaces of another process. Only new children of the caller enter the pid namespace."""
    namespace_fds = []
    for kind in NAMESPACE_FLAGS:
        namespace = Path(f"/proc/{pid}/ns/{kind}")
        if namespace.readlink() != Path(f"/proc/self/ns/{kind}").readlink():
            namespace_fds.append(os.open(namespace, os.O_RDONLY | os.O_CLOEXEC))
    for namespace_fd in namespace_fds:
        call_libc("setns", namespace_fd, 0)
        os.close(namespace_fd)


def fork_child(function: Callable[[], object]) -> int:
    """Fork a child process that runs `function`, and return the pid of the child.

    The child exits with status 0 if the function returns normally.
    """
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
    """Wait for a child process, and return its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_in_namespaces(holder: Process, function: Callable[[], object]) -> int:
    """Run `function` as root inside the cluster whose first process is `holder`, and return the exit status."""

    def enter_and_run() -> None:
        enter_namespaces(holder.pid)
        sys.exit(wait_for_child(fork_child(function)))

    return wait_for_child(fork_child(enter_and_run))


def detach_process(log: Path, keep: socket.socket | None = None) -> None:
    """Detach this process from the terminal, folder, and open files of the caller.

    The output of the process is appended to the file `log`. The socket `keep` remains open.
    """
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
    """Reap ended child processes, as the first process of a process table must do.

    The function returns once `is_needed` returns False.
    """
    # The handler waits for the children. If SIGCHLD were ignored, the kernel would discard their CPU times.
    signal.signal(signal.SIGCHLD, lambda *_: reap_ended_children())
    reap_ended_children()
    while is_needed():
        time.sleep(POLL_SECONDS)


def reap_ended_children() -> None:
    """Wait for the child processes that have already ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def mount_path(source: str, target: str, kind: str | None, flags: int) -> None:
    """Mount a file system. Raises UserError."""
    try:
        call_libc("mount", source.encode(), target.encode(), kind.encode() if kind else None, flags, None)
    except OSError as error:
        remedy = USER_REMEDY if is_single_user_namespace() else ROOT_REMEDY
        raise UserError(f"{remedy} (mount {target}: {error.strerror})") from None


def create_private_mounts(etc: Path | None = None) -> None:
    """Make the mounts of this mount namespace private, and mount a /proc for this process table.

    If the folder `etc` is given, its files replace the files with the same names in /etc. Otherwise, the namespace
    belongs to a host, and the host gets its own shared memory.
    """
    mount_path("none", "/", None, RECURSIVE | PRIVATE)
    mount_path("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
    if not etc:
        if Path("/dev/shm").is_dir():  # noqa: S108
            mount_path("none", "/dev/shm", "tmpfs", NOSUID | NODEV)  # noqa: S108 (hosts must not share memory)
        return
    for file in sorted(etc.iterdir()):
        target = Path("/etc", file.name).resolve()
        if target.exists():
            mount_path(str(file), str(target), None, BIND)
    if Path("/run/nscd").is_dir():  # nscd, the name cache of the machine, would be used instead of these files
        mount_path("none", "/run/nscd", "tmpfs", NOSUID | NODEV)


def run_ip(*lines: str) -> None:
    """Run several ip(8) commands in one process. Raises UserError if a command fails."""
    batch = "\n".join(lines)
    process = subprocess.run(["ip", "-batch", "-"], input=batch, capture_output=True, text=True, check=False)
    if process.returncode:
        raise UserError(f"ip: {process.stderr.splitlines()[0]} ({'; '.join(lines)})")


def read_cable_states() -> dict[str, bool]:
    """Return whether the cable of each host is connected to the switch. The keys are host names."""
    process = subprocess.run(["ip", "-json", "link"], capture_output=True, text=True, check=True)
    cables = [link for link in json.loads(process.stdout) if "link_netnsid" in link]
    return {cable["ifname"]: "UP" in cable["flags"] for cable in cables}


def create_host(name: str, bridge: str, record: Path, run_host: Callable[[socket.socket], None]) -> None:
    """Create the first process, cable, and process record of a host. Raises UserError.

    The first process calls `run_host` with a socket. `run_host` must send a byte on this socket when the host has a
    network. `run_host` then receives a byte when the cable is connected.
    """
    socket_here, socket_of_host = socket.socketpair()
    unshare_namespaces("pid")

    def start_first_process() -> None:
        socket_here.close()
        unshare_namespaces("net", "uts", "mnt")
        run_host(socket_of_host)

    pid = fork_child(start_first_process)
    socket_of_host.close()
    if not socket_here.recv(1):  # the first process exited before the host had a network
        raise UserError(f"{name} did not start")
    # The namespace is given by its path, because `ip` runs in the new process table, where the pid is not valid.
    run_ip(f"link add {name} type veth peer name eth0 netns /proc/{pid}/ns/net", f"link set {name} master {bridge} up")
    Process.identify(pid).save(record)
    socket_here.send(b".")
