"""Processes, namespaces and cables: how one machine becomes several hosts. Knows nothing of SLURM.

A host is a process with its own network, mounts, host name and process table. All hosts live inside
the process table of the controller, whose first process therefore takes everything with it when it ends.
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

KINDS = {"user": 0x10000000, "pid": 0x20000000, "net": 0x40000000, "uts": 0x04000000, "mnt": 0x00020000}
NOSUID, NODEV, NOEXEC, BIND, RECURSIVE, PRIVATE = 0x2, 0x4, 0x8, 0x1000, 0x4000, 0x40000
LIBC = ctypes.CDLL(None, use_errno=True)
REFUSED = (
    "this system does not let an ordinary user make namespaces; on Ubuntu 24.04:"
    " sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or run this as root"
)
REFUSED_ROOT = "namespaces are refused to this root; in a container, start it with --privileged"


def call_libc(name: str, *arguments: object) -> None:
    """Make a system call. Raises OSError with its name."""
    if getattr(LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def unshare_namespaces(*kinds: str) -> None:
    """Leave the given namespaces for new ones. Raises UserError if the system refuses."""
    try:
        call_libc("unshare", sum(KINDS[kind] for kind in kinds))
    except OSError as error:
        remedy = REFUSED if os.getuid() or "user" in kinds or is_single_user() else REFUSED_ROOT
        raise UserError(f"{remedy} ({error.strerror})") from None


def is_single_user() -> bool:
    """Check that uid 0 here is one ordinary user outside."""
    return Path("/proc/self/uid_map").read_text().split()[2] == "1"


def check_user(uid: int) -> str:
    """Return the name of the user that all daemons and jobs run as. Raises UserError."""
    if uid == 0 and is_single_user():
        raise UserError(
            "this root is one ordinary user of the system outside, which SLURM does not accept; be that user"
        )
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        raise UserError(f"user {uid} has no name in /etc/passwd, which SLURM needs; run this as a named user") from None


def become_root(uid: int, gid: int) -> None:
    """Become root of a new user namespace that knows one user, the caller. Raises UserError."""
    unshare_namespaces("user")
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError as error:
        raise UserError(f"{REFUSED} ({error.strerror})") from None


def enter_namespaces(pid: int) -> None:
    """Join the namespaces of a process. The process table changes for children only."""
    doors = []
    for kind in KINDS:
        there, here = Path(f"/proc/{pid}/ns/{kind}"), Path(f"/proc/self/ns/{kind}")
        if there.readlink() != here.readlink():
            doors.append(os.open(there, os.O_RDONLY | os.O_CLOEXEC))
    for door in doors:
        call_libc("setns", door, 0)
        os.close(door)


def fork_child(function: Callable[[], object]) -> int:
    """Fork; the child runs `function` and ends, 0 if it returned. Returns the child's pid."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        with exit_on_user_error():
            function()
        status = 0
    except SystemExit as leaving:
        status = int(leaving.code or 0)
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

    def step() -> None:
        enter_namespaces(holder.pid)
        sys.exit(wait_for_child(fork_child(function)))

    return wait_for_child(fork_child(step))


def detach_process(log: Path, keep: socket.socket | None = None) -> None:
    """Detach from the caller's terminal, folder and files, and write to `log`."""
    os.setsid()
    os.chdir("/")
    os.umask(0o022)
    nothing = os.open(os.devnull, os.O_RDONLY)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    kept = keep.fileno() if keep else 3
    os.closerange(3, kept)
    os.closerange(kept + bool(keep), 1 << 16)


def serve_as_init(wanted: Callable[[], bool]) -> None:
    """Be the first process of a process table, which lasts as long as it: let the kernel collect what ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:  # those that ended before
            pass
    while wanted():
        time.sleep(2)


def mount_path(source: str, target: str, kind: str | None, flags: int) -> None:
    """Mount a file system. Raises UserError."""
    try:
        call_libc("mount", source.encode(), target.encode(), kind.encode() if kind else None, flags, None)
    except OSError as error:
        raise UserError(f"{REFUSED if is_single_user() else REFUSED_ROOT} (mount {target}: {error.strerror})") from None


def make_mounts(etc: Path | None = None) -> None:
    """Make own mounts: nothing reaches the machine's; /proc shows the own process table, /etc the own names."""
    mount_path("none", "/", None, RECURSIVE | PRIVATE)
    mount_path("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
    for file in sorted(etc.iterdir()) if etc else ():
        target = Path("/etc", file.name).resolve()
        if target.exists():
            mount_path(str(file), str(target), None, BIND)
    if etc and Path("/run/nscd").is_dir():  # the machine's name cache would answer before our files
        mount_path("none", "/run/nscd", "tmpfs", NOSUID | NODEV)
    if not etc and Path("/dev/shm").is_dir():  # noqa: S108
        mount_path("none", "/dev/shm", "tmpfs", NOSUID | NODEV)  # noqa: S108 (hosts share no memory)


def run_ip(*lines: str) -> None:
    """Run commands of ip(8), in one process. Raises UserError."""
    done = subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"ip: {done.stderr.splitlines()[0]} ({'; '.join(lines)})")


def list_cables() -> dict[str, bool]:
    """List every cable at the switch, by host: True where it is plugged in."""
    done = subprocess.run(["ip", "-json", "link"], capture_output=True, text=True, check=True)
    return {link["ifname"]: "UP" in link["flags"] for link in json.loads(done.stdout) if "link_netnsid" in link}


def create_host(name: str, bridge: str, record: Path, first: Callable[[socket.socket], None]) -> None:
    """Start a host: a process running `first`, its cable, and its record. Raises UserError."""
    ours, theirs = socket.socketpair()
    unshare_namespaces("pid")

    def begin() -> None:
        ours.close()
        unshare_namespaces("net", "uts", "mnt")
        first(theirs)

    pid = fork_child(begin)
    theirs.close()
    if not ours.recv(1):  # its network exists, or it has failed
        raise UserError(f"{name} did not start")
    # by path, not by number: the command runs in the new process table, as every child of this process does
    run_ip(f"link add {name} type veth peer name eth0 netns /proc/{pid}/ns/net", f"link set {name} master {bridge} up")
    Process.identify(pid).save(record)
    ours.send(b".")
