"""An elastic run in one process: coordinator and supervisor in a thread, and members with real connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from common.techniques.elastic.member import Generation, Member
from common.techniques.elastic.supervisor import Supervisor
from configs.dataparallel import Elastic
from tests.harness.commands.processes import wait_until

KEY = "secret"


class RecordingMember(Member):
    """A member that records why it must leave. The process of a real member ends."""

    leave_reason = ""

    def _end_process(self, reason: str, command: Sequence[str] = (), *, lost: bool = False) -> None:
        self.leave_reason = reason


class ElasticRun:
    """Coordinator, supervisor and members of a run.

    The first `irreplaceable` ranks cannot be replaced. The last `absent` ranks have not connected.
    """

    def __init__(
        self, path: Path, ranks: int, settings: Elastic, *, irreplaceable: int, absent: int, start_timeout: float
    ) -> None:
        self.path = str(path)
        self.connections: list[socket.socket] = []
        """Sockets of all members, including those that a restarted rank has replaced."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.path)
        listener.listen()
        self.unresponsive: list[int] = []
        self.started: list[int] = []
        self.lost: set[int] = set()
        callbacks = (self.unresponsive.append, self.started.append)
        self.supervisor = Supervisor(listener, ranks, settings, *callbacks, KEY, start_timeout)
        self.coordinator = self.supervisor.coordinator
        self.is_stopped = threading.Event()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()
        connected = ranks - absent
        self.members = [self.connect(rank, irreplaceable=rank < irreplaceable) for rank in range(connected)]
        wait_until(lambda: len(self.coordinator.connected_ranks) == connected, "all ranks are connected")

    def serve(self) -> None:
        """Answer the members until the run is stopped."""
        while not self.is_stopped.is_set():
            self.supervisor.poll_and_restart_ranks(self.lost)
        self.coordinator.close()

    def stop(self) -> None:
        """Close the coordinator, and then the sockets of the members, whose threads have ended by then."""
        self.is_stopped.set()
        self.thread.join()
        for thread in threading.enumerate():
            if thread.name == "elastic":
                thread.join(timeout=10)
        for connection in self.connections:
            connection.close()

    def connect(self, rank: int, *, joins: bool = False, irreplaceable: bool = False) -> RecordingMember:
        timeout = self.coordinator.settings.timeout
        member = RecordingMember(self.path, rank, timeout, KEY, joins=joins, irreplaceable=irreplaceable)
        self.connections.append(member.socket)
        return member

    def kill(self, rank: int) -> None:
        """Close the connection of a rank, and report the rank as lost."""
        self.lost.add(rank)
        self.members[rank].closed = True
        self.members[rank].socket.shutdown(socket.SHUT_RDWR)

    def sign_in(self, steps: Mapping[int, int], *, together: bool = False) -> dict[int, Generation]:
        """Sign in ranks at the same time, with the number of steps of each, and return their generations."""
        generations: dict[int, Generation] = {}

        def sign_in_rank(rank: int, step: int) -> None:
            generations[rank] = self.members[rank].sign_in([step, 0, 1], together=together)

        threads = [threading.Thread(target=sign_in_rank, args=pair, daemon=True) for pair in steps.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return generations

    def start_to_sign_in(self, rank: int, step: int) -> None:
        """Sign in a rank without waiting for its generation."""
        threading.Thread(target=self.sign_in, args=({rank: step},), daemon=True).start()

    def join_rank_1(self, step: int) -> dict[int, Generation]:
        """Let rank 1 join without a state while rank 0 trains. Rank 0 signs in as soon as it knows of the other."""
        generations: dict[int, Generation] = {}
        self.members[1] = self.connect(1, joins=True)
        assert not self.members[0].generation_ended
        joining = threading.Thread(target=lambda: generations.update(self.sign_in({1: -1})), daemon=True)
        joining.start()
        wait_until(lambda: self.members[0].has_waiting_rank, "rank 0 knows that a rank waits")
        assert not self.members[0].generation_ended
        generations.update(self.sign_in({0: step}, together=True))
        joining.join(30)
        return generations


StartRun = Callable[..., ElasticRun]
