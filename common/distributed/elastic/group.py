"""Process group of a generation: formed through the coordinator, and cut when the generation is over."""

from __future__ import annotations

import base64
import contextlib
import datetime
import os
import socket
import stat
import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from common.distributed.elastic.member import Member
from common.distributed.rendezvous import World

Connections = list[tuple[int, int]]  # file descriptor and inode of each
CONNECT_FACTOR = 5  # gloo waits so many times the time-out of a group for its ranks to connect
set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)  # an older torch has the second
LEFT: list[Any] = []
"""Process groups that this rank has left and not freed yet."""


class CoordinatorStore(dist.Store):
    """Store through which the ranks of a generation tell their addresses; a wait ends when the generation is over."""

    def __init__(self, member: Member) -> None:
        super().__init__()
        self.member = member

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # it is called with bytes
        """Set a value."""
        self.member.set(key, base64.b64encode(value).decode())

    def get(self, key: str) -> bytes:
        """Wait for a value and return it. Raises GenerationOver."""
        return base64.b64decode(self.member.get([key])[0])

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all keys are set. Raises GenerationOver."""
        self.member.get(keys)


def form_group(member: Member, timeout: datetime.timedelta, number: int) -> None:
    """Leave the process group, if there is one, and form that of the member's generation.

    `timeout` is that of its collectives. Nothing wakes a rank that waits for another one to connect, so connecting has
    a short time limit: a little more than the time after which the coordinator gives up a rank that does not answer.
    Raises RuntimeError.
    """
    if dist.is_initialized():
        leave_group()
    members = member.generation.members
    # torch counts groups, also those that failed to form, and the count names the keys of their store
    dist.distributed_c10d._world.group_count = 0
    limit = datetime.timedelta(seconds=member.patience / CONNECT_FACTOR)
    with member.in_bounded_wait():
        dist.init_process_group(
            "gloo", store=CoordinatorStore(member), rank=members.index(number), world_size=len(members), timeout=limit
        )
    set_timeout(timeout)


def leave_group() -> None:
    """Leave the process group, which stays in memory until `free_left_groups`."""
    LEFT.append(dist.group.WORLD)
    dist.destroy_process_group()


def free_left_groups() -> None:
    """Free the groups that this rank has left, once nothing uses them any more, such as a reducer of DDP.

    In a thread, as freeing one waits for its collectives, and one of those may never end.
    """
    left, LEFT[:] = [*LEFT], []
    threading.Thread(target=left.clear, daemon=True, name="free groups").start()


def update_world(world: World, **facts: Any) -> None:
    """Change facts in place, for all who hold this object, where an elastic run goes on with other ranks."""
    for name, value in facts.items():
        object.__setattr__(world, name, value)


def list_connections(*spared: socket.socket) -> Connections:
    """Return the TCP connections of this process, without those that are spared."""
    kept, found = {one.fileno() for one in spared}, Connections()
    for fd in (int(name) for name in os.listdir("/proc/self/fd")):  # noqa: PTH208 (the names alone)
        with contextlib.suppress(OSError):
            status = os.fstat(fd)
            if fd in kept or not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                    copy.getpeername()  # raises for one that only listens
                    found.append((fd, status.st_ino))
    return found


def cut_connections(connections: Connections) -> None:
    """Shut down what connections receive, so that collectives that wait for them fail at once.

    gloo cannot abort a collective, and its time-out would have to be longer than any step, evaluation or checkpoint.
    Shut down in both directions, a connection that has received a part of a message wakes nobody.
    """
    for fd, inode in connections:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            if os.fstat(copy.fileno()).st_ino == inode:  # else gloo has closed it, and the number is another file's
                copy.shutdown(socket.SHUT_RD)
