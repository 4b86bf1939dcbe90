"""Supervisor of the forked ranks of an elastic run: kills those that do not answer, and starts lost ones again."""

from __future__ import annotations

import collections
import socket
from collections.abc import Callable

from common.distributed.elastic.coordinator import Coordinator
from configs.elastic import Elastic

POLL_SECONDS = 0.01


class Supervisor:
    """The launcher's view of an elastic run. `kill` and `start` end and fork the process of a rank."""

    def __init__(
        self, path: str, size: int, settings: Elastic, kill: Callable[[int], None], start: Callable[[int], None]
    ) -> None:
        """`path` is where the coordinator's socket will lie, in a private folder."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(size + 1)
        self.settings, self.start = settings, start
        self.coordinator = Coordinator(listener, size, settings)
        self.coordinator.on_silence = kill
        self.starts: collections.Counter[int] = collections.Counter()
        self.starting: set[int] = set()

    def absorb(self, rank: int, exit_code: int) -> bool:
        """Return whether the run goes on without a rank whose process has ended: only one that was killed is lost."""
        self.starting.discard(rank)
        return exit_code < 0 and self.coordinator.lose(rank)

    def tend(self) -> None:
        """Answer the ranks, and start those again that are missing once the others go on."""
        self.coordinator.poll(POLL_SECONDS)
        vacant = self.coordinator.vacant
        self.starting &= set(vacant)
        for rank in vacant:
            if rank not in self.starting and self.starts[rank] < self.settings.rejoin and not self.coordinator.stops:
                self.starts[rank] += 1
                self.starting.add(rank)
                self.start(rank)
