"""Processes in namespaces of their own: detached children, orphans, and refused permissions."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from common.system.errors import UserError
from slurm.local_cluster import namespaces


def open_inheritable_file(path: Path) -> int:
    """Open a file for writing whose descriptor child processes inherit."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.set_inheritable(descriptor, True)
    return descriptor


def test_a_detached_process_inherits_only_the_socket_that_it_keeps(tmp_path: Path) -> None:
    """One inherited descriptor is smaller than that of the socket, and one is greater."""
    first_descriptor = open_inheritable_file(tmp_path / "secret")
    receiver, sender = socket.socketpair()
    last_descriptor = open_inheritable_file(tmp_path / "secret")
    descriptors = (first_descriptor, last_descriptor)

    def run_detached() -> None:
        namespaces.detach_process(tmp_path / "log", keep=sender)
        sender.send(str(Path.cwd()).encode())
        is_leader = os.getsid(0) == os.getpid()
        find_leaks = "".join(f"test ! -e /proc/self/fd/{number} || echo leaked; " for number in descriptors)
        os.execvp("sh", ["sh", "-c", f"echo leader {is_leader}; {find_leaks}"])

    assert namespaces.wait_for_child(namespaces.fork_child(run_detached)) == 0
    for descriptor in descriptors:
        os.close(descriptor)
    assert receiver.recv(100) == b"/"
    assert (tmp_path / "log").read_text() == "leader True\n"


def test_the_first_process_collects_children_that_ended_before(tmp_path: Path) -> None:
    def run_first_process() -> None:
        for _ in range(2):
            pid = namespaces.fork_child(lambda: None)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # the child has ended and remains a zombie
        namespaces.serve_as_init(lambda: False)
        children = Path("/proc/self/task", str(os.getpid()), "children").read_text()
        (tmp_path / "children").write_text(children)

    assert namespaces.wait_for_child(namespaces.fork_child(run_first_process)) == 0
    assert (tmp_path / "children").read_text() == ""


def test_refused_namespaces_are_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *_: object) -> None:
        raise OSError(1, f"{name}: Operation not permitted")

    monkeypatch.setattr(namespaces, "call_libc", refuse)
    with pytest.raises(UserError, match=r"kernel.apparmor_restrict_unprivileged_userns=0, or run this command as root"):
        namespaces.unshare_namespaces("user")
    with pytest.raises(UserError, match=r"sysctl|--privileged"):
        namespaces.mount_path("none", "/", None, 0)
