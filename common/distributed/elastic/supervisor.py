"""Supervisor of the ranks of an elastic run: ends those that do not answer, and starts lost ones again."""

from __future__ import annotations

import collections
import socket
import time
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
        start_timeout: float = 60.0,
        give_up_start: Callable[[int], None] | None = None,
    ) -> None:
        """`listener` is the coordinator's socket, `key` what a rank has to know where others can reach it.

        A rank that was started again has `start_timeout` seconds to reach the coordinator; then `give_up_start`, by
        default `kill`, ends its process.
        """
        self.settings, self.start, self.start_timeout = settings, start, start_timeout
        self.give_up_start = give_up_start or kill
        self.coordinator = Coordinator(listener, size, settings, key)
        self.coordinator.on_silence = kill
        self.starts: collections.Counter[int] = collections.Counter()
        self.starting: dict[int, float] = {}
        """Ranks that were started again and have not reached the coordinator, and when each was."""

    def accept_loss(self, rank: int, exit_code: int) -> bool:
        """Return whether the run goes on without a rank whose process has ended.

        Only one that was killed is lost; one that was started again and has not joined may fail in any way.
        """
        is_new = rank in self.newcomers
        self.starting.pop(rank, None)
        if is_new and exit_code > 0:
            print(f"rank {rank}, started again, failed with status {exit_code}; see its log", flush=True)
        return (exit_code < 0 or is_new) and self.coordinator.note_ended_member(rank)

    @property
    def newcomers(self) -> set[int]:
        """Ranks that were started again and belong to no generation yet."""
        return self.coordinator.newcomers | self.starting.keys()

    def poll_and_restart_ranks(self, ended: Container[int]) -> None:
        """Answer the ranks, and start those again that are missing once the others go on.

        `ended` has those that are known to have ended, as lost ones: another may have failed by itself.
        """
        self.coordinator.poll_members(POLL_SECONDS)
        now = time.monotonic()
        for rank in self.coordinator.present & self.starting.keys():
            del self.starting[rank]
        for rank in [rank for rank, began in self.starting.items() if now - began > self.start_timeout]:
            print(f"restarted rank {rank} did not connect within {self.start_timeout:g} s; killing it", flush=True)
            del self.starting[rank]
            self.give_up_start(rank)
        for rank in self.coordinator.vacant:
            if rank not in ended:
                continue
            if rank not in self.starting and self.starts[rank] < self.settings.rejoin and not self.coordinator.stops:
                self.starts[rank] += 1
                self.starting[rank] = now
                self.start(rank)
