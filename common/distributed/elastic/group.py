"""Process group of a generation: formed through the coordinator, and cut when the generation ends."""

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
CONNECT_FACTOR = 5  # gloo waits for connections this many times the timeout of a group
set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)  # the fallback is for older torch
LEFT_GROUPS: list[Any] = []
"""Process groups that this rank has left and not freed yet."""


class CoordinatorStore(dist.Store):
    """Store through which the ranks of a generation exchange addresses; waits fail when the generation ends."""

    def __init__(self, member: Member) -> None:
        super().__init__()
        self.member = member

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch calls it with bytes
        """Set a value."""
        self.member.set_value(key, base64.b64encode(value).decode())

    def get(self, key: str) -> bytes:
        """Wait for a value and return it. Raises GenerationEnded."""
        return base64.b64decode(self.member.get_values([key])[0])

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all keys are set. Raises GenerationEnded."""
        self.member.get_values(keys)


def form_group(member: Member, timeout: datetime.timedelta, number: int) -> None:
    """Leave the current process group, if any, and form that of the member's generation.

    `timeout` is the time limit of its collectives, `number` this rank's original rank. A rank that waits for the
    connection of another one cannot be woken. Therefore connecting has a short time limit, slightly longer than the
    time after which the coordinator declares an unresponsive rank lost. Raises RuntimeError.
    """
    if dist.is_initialized():
        leave_group()
    members = member.generation.members
    # torch names the keys of a group's store by its count of groups, which includes groups that failed to form.
    dist.distributed_c10d._world.group_count = 0
    connect_timeout = datetime.timedelta(seconds=member.max_sleep_seconds / CONNECT_FACTOR)
    with member.in_bounded_wait():
        dist.init_process_group(
            "gloo",
            store=CoordinatorStore(member),
            rank=members.index(number),
            world_size=len(members),
            timeout=connect_timeout,
        )
    set_timeout(timeout)


def leave_group() -> None:
    """Leave the process group. It stays in memory until `free_left_groups`."""
    LEFT_GROUPS.append(dist.group.WORLD)
    dist.destroy_process_group()


def free_left_groups() -> None:
    """Free the groups that this rank has left. Call it once nothing uses them, such as a reducer of DDP.

    It uses a thread, because freeing a group waits for its collectives, which may never end.
    """
    groups = LEFT_GROUPS.copy()
    LEFT_GROUPS.clear()
    threading.Thread(target=groups.clear, daemon=True, name="free groups").start()


def update_world(world: World, **facts: Any) -> None:
    """Change fields of the world in place, for all users of the object."""
    for name, fact in facts.items():
        object.__setattr__(world, name, fact)


def list_connections(*excluded: socket.socket) -> Connections:
    """Return the TCP connections of this process except the excluded ones."""
    excluded_fds = {connection.fileno() for connection in excluded}
    connections: Connections = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (names suffice)
        fd = int(name)
        with contextlib.suppress(OSError):
            status = os.fstat(fd)
            if fd in excluded_fds or not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM:
                    copy.getpeername()  # raises OSError for a listening socket
                    connections.append((fd, status.st_ino))
    return connections


def cut_connections(connections: Connections) -> None:
    """Shut down the receiving side of connections, so that waiting collectives fail at once.

    gloo cannot abort a collective, and its timeout would have to exceed every step, evaluation and checkpoint. Shutting
    down both directions would not wake a connection that has received a part of a message.
    """
    for fd, inode in connections:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            if os.fstat(copy.fileno()).st_ino == inode:  # else gloo has closed it and the descriptor was reused
                copy.shutdown(socket.SHUT_RD)
