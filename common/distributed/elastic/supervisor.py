"""Supervisor of the ranks of an elastic run: ends those that do not answer, and starts lost ones again."""

from __future__ import annotations

import collections
import socket
from collections.abc import Callable, Container

from common.distributed.elastic.coordinator import Coordinator
from configs.elastic import Elastic

POLL_SECONDS = 0.01


def open_listener(address: str, size: int) -> socket.socket:
    """Listen for the ranks of a run at the path of a UNIX socket, or at host:port. Raises OSError."""
    host, _, port = address.rpartition(":")
    listener = socket.socket(socket.AF_INET if port.isdecimal() else socket.AF_UNIX)
    listener.bind((host, int(port)) if port.isdecimal() else address)
    listener.listen(size + 1)
    return listener


class Supervisor:
    """The launcher's view of an elastic run. `kill` and `start` end and start the process of a rank."""

    def __init__(
        self,
        listener: socket.socket,
        size: int,
        settings: Elastic,
        kill: Callable[[int], None],
        start: Callable[[int], None],
        key: str = "",
    ) -> None:
        """`listener` is the coordinator's socket, `key` what a rank has to know where others can reach it."""
        self.settings, self.start = settings, start
        self.coordinator = Coordinator(listener, size, settings, key)
        self.coordinator.on_silence = kill
        self.starts: collections.Counter[int] = collections.Counter()
        self.starting: set[int] = set()

    def accept_loss(self, rank: int, exit_code: int) -> bool:
        """Return whether the run goes on without a rank whose process has ended: only one that was killed is lost."""
        self.starting.discard(rank)
        return exit_code < 0 and self.coordinator.note_ended_member(rank)

    def poll_and_restart_ranks(self, ended: Container[int]) -> None:
        """Answer the ranks, and start those again that are missing once the others go on.

        `ended` has those that are known to have ended, as lost ones: another may have failed by itself.
        """
        self.coordinator.poll_members(POLL_SECONDS)
        self.starting -= self.coordinator.present
        for rank in self.coordinator.vacant:
            if rank not in ended:
                continue
            if rank not in self.starting and self.starts[rank] < self.settings.rejoin and not self.coordinator.stops:
                self.starts[rank] += 1
                self.starting.add(rank)
                self.start(rank)
