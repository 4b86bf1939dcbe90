"""Supervisor of the ranks of an elastic run, which ends unresponsive ranks and restarts lost ranks."""

from __future__ import annotations

import collections
import socket
import time
from collections.abc import Callable, Container

from common.system.errors import summarize_error
from common.system.exit_status import EXIT_RESUMABLE
from common.techniques.elastic.coordinator import Coordinator, EndReason
from configs.dataparallel import Elastic

POLL_SECONDS = 0.01
RETRY_SECONDS = 10.0  # pause after a new process of a rank could not be started, for example due to a lack of memory


def open_listener(address: str, size: int) -> socket.socket:
    """Listen for ranks on a UNIX socket (path) or a TCP socket (host:port).

    Raises OSError if the address cannot be used.
    """
    host, _, port = address.rpartition(":")
    if port.isdecimal():
        listener = socket.socket(socket.AF_INET)
        listener.bind((host, int(port)))
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
    listener.listen(size + 1)
    return listener


class Supervisor:
    """Supervisor that a launcher uses to manage the ranks of an elastic run.

    `kill` ends the process of a rank, and `start` starts a new process for a rank.
    """

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
        """Create the supervisor and its coordinator, which listens on the socket `listener`.

        `key` authenticates the ranks if other users can connect to this socket. If a restarted rank does not connect to
        the coordinator within `start_timeout` seconds, `give_up_start` (default: `kill`) ends the process of the rank.
        """
        self.settings = settings
        self.start = start
        self.start_timeout = start_timeout
        self.give_up_start = give_up_start or kill
        self.coordinator = Coordinator(listener, size, settings, key)
        self.coordinator.on_unresponsive = kill
        self.restarts: collections.Counter[int] = collections.Counter()
        """Number of restarts of each rank."""
        self.start_times: dict[int, float] = {}
        """Start times of restarted ranks that have not connected to the coordinator yet."""
        self.retry_times: dict[int, float] = {}
        """For each rank that could not be started, the earliest time of the next start."""

    def handle_ended_rank(self, rank: int, exit_code: int) -> bool:
        """Handle the end of a rank's process, and return whether the run continues without this rank.

        The run continues after a rank has finished or has stopped on request. Only a rank that was killed by a signal
        counts as lost. A rank that fails in any other way ends the run, unless the rank was restarted and has not
        joined a generation yet.
        """
        is_new = rank in self.joining_ranks
        self.start_times.pop(rank, None)
        if exit_code in (0, EXIT_RESUMABLE):
            return True
        if is_new and exit_code > 0:
            print(f"restarted rank {rank} failed with exit status {exit_code}; check its log", flush=True)
        return (exit_code < 0 or is_new) and self.coordinator.handle_ended_member(rank)

    @property
    def joining_ranks(self) -> set[int]:
        """Restarted ranks that do not belong to a generation yet."""
        return self.coordinator.joining_ranks | self.start_times.keys()

    def poll_and_restart_ranks(self, lost_ranks: Container[int]) -> None:
        """Answer the messages of the ranks, and restart missing ranks while the other ranks continue.

        Only ranks in `lost_ranks`, which are known to be lost, are restarted. Any other missing rank may have exited
        with an error, which ends the run.
        """
        self.coordinator.poll_members(POLL_SECONDS)
        now = time.monotonic()
        for rank in self.coordinator.connected_ranks & self.start_times.keys():
            del self.start_times[rank]

        for rank, started in list(self.start_times.items()):
            if now - started > self.start_timeout:
                print(f"restarted rank {rank} did not connect within {self.start_timeout:g} s; killing it", flush=True)
                del self.start_times[rank]
                self.give_up_start(rank)

        for rank in self.coordinator.missing_ranks:
            if rank not in lost_ranks or rank in self.start_times or self.coordinator.below_minimum:
                continue
            if self.restarts[rank] < self.settings.rejoin and now >= self.retry_times.get(rank, now):
                self._restart(rank, now)

    def _restart(self, rank: int, now: float) -> None:
        """Start a new process for a rank. If this fails, the other ranks continue, and the next start is delayed."""
        self.restarts[rank] += 1
        try:
            self.start(rank)
            self.start_times[rank] = now
        except OSError as error:
            self.retry_times[rank] = now + RETRY_SECONDS
            attempt = f"restart {self.restarts[rank]} of {self.settings.rejoin}"
            print(f"rank {rank} could not be restarted ({attempt}): {summarize_error(error)}", flush=True)

    # ---- messages of the launcher

    def find_problem_without_failed_rank(self) -> str:
        """Return why the run must end although no rank has failed; an empty string if it can continue."""
        is_lost = self.coordinator.end_reason is EndReason.STATE_LOST
        return EndReason.STATE_LOST.value if is_lost else ""

    def explain_loss(self, rank: int) -> str:
        """Return why a rank ended itself or was declared lost; an empty string if the reason is unknown."""
        return self.coordinator.reasons.get(rank, "")

    def explain_end(self) -> str:
        """Return why the run ends after a rank was killed; an empty string if there is no further reason."""
        reason = self.coordinator.find_end_reason()
        return "" if reason is None else reason.value


def open_local_supervisor(
    address: str,
    size: int,
    settings: Elastic,
    kill: Callable[[int], None],
    start: Callable[[int], None],
    start_timeout: float,
) -> Supervisor:
    """Open the supervisor of ranks that run on this machine and connect to the UNIX socket `address`."""
    return Supervisor(open_listener(address, size), size, settings, kill, start, start_timeout=start_timeout)
