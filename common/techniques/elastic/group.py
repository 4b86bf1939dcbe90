"""Process group of a generation, formed through the coordinator and disconnected when the generation ends."""

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

from common.system.bounded_wait import mark_bounded_wait
from common.techniques.elastic.member import Member

Connections = list[tuple[int, int]]  # file descriptor and inode of each connection
CONNECT_FACTOR = 5  # gloo waits for connections for five times the timeout of a process group
set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)  # older torch needs the fallback
LEFT_GROUPS: list[Any] = []
"""Process groups that this rank has left but has not freed yet."""


class CoordinatorStore(dist.Store):
    """Store with which the ranks of a generation exchange their addresses through the coordinator."""

    def __init__(self, member: Member) -> None:
        super().__init__()
        self.member = member

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch calls this method with bytes
        """Set the value of a key."""
        self.member.set_value(key, base64.b64encode(value).decode())

    def get(self, key: str) -> bytes:
        """Wait until a key is set and return its value. Raises GenerationEnded if the generation ends first."""
        return base64.b64decode(self.member.get_values([key])[0])

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all keys are set. Raises GenerationEnded if the generation ends first."""
        self.member.get_values(keys)


def form_process_group(member: Member, timeout: datetime.timedelta, number: int) -> None:
    """Leave the current process group, if any, and form the process group of the member's generation.

    `timeout` is the time limit of the group's collectives, and `number` is the original rank of this process. A rank
    that is waiting for a connection cannot be woken up. Therefore, the time limit for connecting is only slightly
    longer than the time after which the coordinator declares an unresponsive rank lost. Raises RuntimeError if the
    ranks cannot connect.
    """
    if dist.is_initialized():
        leave_process_group()
    members = member.generation.members
    # torch uses a count of groups in the keys of the store. This count includes groups that failed to form, so it may
    # differ between ranks.
    dist.distributed_c10d._world.group_count = 0
    connect_timeout = datetime.timedelta(seconds=member.max_sleep_seconds / CONNECT_FACTOR)
    with mark_bounded_wait():
        dist.init_process_group(
            "gloo",
            store=CoordinatorStore(member),
            rank=members.index(number),
            world_size=len(members),
            timeout=connect_timeout,
        )
    set_timeout(timeout)


def leave_process_group() -> None:
    """Leave the process group, which stays in memory until `free_left_process_groups` is called."""
    LEFT_GROUPS.append(dist.group.WORLD)
    dist.destroy_process_group()


def free_left_process_groups() -> None:
    """Free the process groups that this rank has left.

    Call this function only when no other object, such as DDP's reducer, uses these groups. The groups are freed in a
    thread, because freeing a group waits for its collectives, which may never end.
    """
    groups = LEFT_GROUPS.copy()
    LEFT_GROUPS.clear()
    threading.Thread(target=groups.clear, daemon=True, name="free groups").start()


def list_connections(*excluded: socket.socket) -> Connections:
    """Return all TCP connections of this process except the excluded ones."""
    excluded_fds = {connection.fileno() for connection in excluded}
    connections: Connections = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (only names are needed)
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


def shut_down_connections(connections: Connections) -> None:
    """Shut down the receiving side of connections, so that waiting collectives fail immediately.

    A collective of gloo cannot be aborted. Its timeout ends the wait too late, because this timeout must exceed the
    duration of every step, evaluation, and checkpoint. Shutting down both directions would not wake up a collective
    that has received only a part of a message.
    """
    for fd, inode in connections:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            if os.fstat(copy.fileno()).st_ino == inode:  # otherwise, the descriptor has been reused for another file
                copy.shutdown(socket.SHUT_RD)
