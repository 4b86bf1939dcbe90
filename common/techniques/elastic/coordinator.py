"""Coordinator of an elastic run, which tracks the live ranks and groups them into generations.

A generation is a set of ranks that train together. The coordinator forms a new generation when a rank is lost or joins.
The coordinator runs in the launcher, never in a rank, and does not import torch. Each rank has one connection to the
coordinator. This connection carries heartbeats, reports of failed steps, and the addresses of the ranks of a
generation. Messages are JSON objects, one per line.
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import json
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.techniques.elastic.member import disable_send_delay
from configs.dataparallel import Elastic

MAX_MESSAGE_BYTES = 1 << 20  # messages from members are far smaller
MAX_HELLO_BYTES = 1 << 12  # size limit of the first message
EXTRA_CONNECTIONS = 16  # connections allowed in addition to two per rank
FINAL_POLLS = 100
LEAVE_FINISHED_RUN = {"leave": "the run has finished"}


class EndReason(enum.Enum):
    """Why the remaining ranks cannot continue the run."""

    SHARD_LOST = "the run cannot continue: the lost rank held a part of the state that no other rank has"
    STATE_LOST = (
        "the run cannot continue: every rank with the full state was lost before a new rank had received a copy"
    )


@dataclass(eq=False)
class RankConnection:
    """Connection of a rank to the coordinator."""

    socket: socket.socket
    last_heard: float
    pid: int = 0
    rank: int = -1
    """Original rank; -1 until the rank has identified itself."""
    joins: bool = False
    """True for a restarted rank until it belongs to a generation."""
    irreplaceable: bool = False
    """True if the other ranks cannot continue without this rank."""
    received: bytes = b""
    sign_in: dict[str, Any] | None = None
    """Request of the rank to join the next generation; None if there is no request. The entry `progress` is a list that
    starts with the number of finished steps, or with -1 if the rank does not have the training state. The entry `done`
    is true if the rank has finished. The entry `together` is true if all ranks leave their generation after the same
    step."""
    awaited_keys: list[str] = field(default_factory=list)
    """Keys whose values in the coordinator's store the rank is waiting for."""
    has_left: bool = False
    """True after the rank has left the run in an orderly way, although its connection is still open."""

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the rank. Nothing is sent if the rank is unknown or its connection is closed."""
        if self.rank >= 0:
            with contextlib.suppress(OSError):
                self.socket.sendall(json.dumps(message).encode() + b"\n")


class Coordinator:
    """Coordinator of one run. The launcher must repeatedly call `poll_members`, which handles all messages.

    The run can survive the loss of a rank after all ranks have connected and until all ranks are done. At any other
    time, the launcher ends the run when a rank is lost.
    """

    def __init__(self, listener: socket.socket, size: int, settings: Elastic, key: str = "") -> None:
        self.listener = listener
        self.size = size
        self.settings = settings
        self.key = key
        self.selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ)
        self.connections: set[RankConnection] = set()
        self.generation_number = 0
        """Number of the newest generation; 0 before the first generation."""
        self.arrived: set[int] = set()
        """Ranks that have connected at least once."""
        self.members: list[int] = []
        """Members of the newest generation that have not been lost."""
        self.generation_ended = False
        """True from the first failure in a generation until the next generation is formed."""
        self.finished = False
        self.end_reason: EndReason | None = None
        """Why the remaining ranks cannot continue, so that the launcher must end the run; None if they can."""
        self.below_minimum = False
        """True once there has been a generation with fewer than `elastic.min` members."""
        self.lost: list[int] = []
        """Members lost since the newest generation was formed."""
        self.reasons: dict[int, str] = {}
        """For each rank, the reason why the newest process of the rank ended itself or was declared lost."""
        self.store: dict[str, str] = {}
        self.polled = time.monotonic()
        self.on_unresponsive: Callable[[int], None] = lambda member: None
        """Function that is called with the number of a rank that is declared lost because it is unresponsive."""

    @property
    def is_active(self) -> bool:
        """True while the run can survive the loss of a rank."""
        return bool(self.members) and not self.finished and not self.end_reason

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks that have no connection while a generation is training; empty at any other time."""
        return self.absent_ranks if self.is_active and not self.generation_ended else []

    @property
    def absent_ranks(self) -> list[int]:
        """Ranks that have no connection."""
        return sorted(set(range(self.size)) - self.connected_ranks)

    @property
    def connected_ranks(self) -> set[int]:
        """Ranks that have a connection."""
        return {connection.rank for connection in self.connections} - {-1}

    @property
    def joining_ranks(self) -> set[int]:
        """Restarted ranks that are connected but do not belong to a generation yet."""
        return {connection.rank for connection in self.connections if connection.joins}

    def find_end_reason(self) -> EndReason | None:
        """Return why a run ends after a rank was killed, for the message of the launcher.

        Return None if the loss of this rank would also have ended a run without elastic=true.
        """
        if self.end_reason or self.finished or not self.generation_number:
            return self.end_reason
        return None if self.members else EndReason.STATE_LOST

    def find_process_id(self, member: int) -> int:
        """Return the process ID that a member has on its host, or 0 if the member is not connected."""
        for connection in self.connections:
            if connection.rank == member:
                return connection.pid
        return 0

    def poll_members(self, seconds: float) -> bool:
        """Wait up to `seconds` seconds for messages, answer all messages, and then drop unresponsive members.

        Return whether messages have arrived.
        """
        ready = self.selector.select(seconds)
        for key, _ in ready:
            if key.data is None:
                self._accept_connection()
            else:
                self._read_messages(key.data)

        now = time.monotonic()
        timeout = self.settings.timeout
        was_suspended = now - self.polled > timeout / 2  # this process was suspended, so heartbeats may still be unread
        self.polled = now
        for connection in list(self.connections):
            if was_suspended:
                connection.last_heard = now
            elif now - connection.last_heard > timeout:
                if connection.rank >= 0 and not connection.has_left:
                    self.reasons[connection.rank] = f"was declared lost: no heartbeat for {timeout:g} s"
                    self.on_unresponsive(connection.rank)
                self._drop_connection(connection)
        return bool(ready)

    def handle_ended_member(self, member: int) -> bool:
        """Handle the end of a member's process, and return whether the run can continue without this member."""
        for _ in range(FINAL_POLLS):  # reads the member's last messages, unless other clients never stop sending
            if not self.poll_members(0):
                break
        for connection in list(self.connections):
            if connection.rank == member:
                self._drop_connection(connection)
        return self.is_active

    def close(self) -> None:
        """Close all connections. A forked child process, which inherits the connections, must also call this method."""
        for connection in self.connections:
            connection.socket.close()
        self.listener.close()
        self.selector.close()

    def _accept_connection(self) -> None:
        with contextlib.suppress(OSError):
            accepted, _ = self.listener.accept()
            if len(self.connections) > 2 * self.size + EXTRA_CONNECTIONS:
                accepted.close()
                return
            accepted.settimeout(1.0)  # limits the time of sending; the socket is read only when data is available
            disable_send_delay(accepted)
            connection = RankConnection(accepted, time.monotonic())
            self.connections.add(connection)
            self.selector.register(accepted, selectors.EVENT_READ, connection)

    def _read_messages(self, connection: RankConnection) -> None:
        try:
            part = connection.socket.recv(1 << 16)
        except OSError:
            part = b""
        limit = MAX_HELLO_BYTES
        if connection.rank >= 0:
            connection.last_heard = time.monotonic()
            limit = MAX_MESSAGE_BYTES
        *lines, connection.received = (connection.received + part).split(b"\n")
        if not part or len(connection.received) > limit:
            self._drop_connection(connection)
            return
        for line in lines:
            try:
                self._answer_message(connection, json.loads(line))
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
                self._drop_connection(connection)  # an invalid message does not come from a rank of this run
                return

    def _answer_message(self, connection: RankConnection, message: dict[str, Any]) -> None:
        if "hello" in message:
            self._identify_rank(connection, message)
        elif connection.rank < 0:
            raise ValueError
        elif "sign_in" in message:
            connection.sign_in = message["sign_in"]
            if connection.joins:
                self._announce_join(connection)
            elif not connection.sign_in["done"] and not connection.sign_in["together"]:
                self._end_generation()
            self._form_generation_if_ready()
        elif "set" in message:
            self.store[message["set"]] = message["value"]
            self._answer_store_requests()
        elif "get" in message:
            connection.awaited_keys = message["get"]
            self._answer_store_requests()
        elif "lost" in message:
            self.reasons[connection.rank] = str(message["lost"])
            self._count_rank_as_lost(connection)
        elif "bye" in message:
            connection.has_left = True
            self._remove_member(connection, failed=False)

    def _identify_rank(self, connection: RankConnection, message: dict[str, Any]) -> None:
        """Assign a connection to the rank that identifies itself in the first message.

        Raises ValueError if the key is wrong, the rank is invalid, or the rank is already connected.
        """
        rank = int(message["hello"])
        pid = int(message["pid"])
        key = str(message["key"]).encode()
        if not hmac.compare_digest(key, self.key.encode()):
            raise ValueError
        if pid < 2 or rank not in range(self.size) or rank in self.connected_ranks:
            raise ValueError
        connection.rank = rank
        connection.joins = bool(message["joins"])
        connection.pid = pid
        connection.irreplaceable = bool(message["irreplaceable"])
        connection.last_heard = time.monotonic()
        self.reasons.pop(rank, None)
        if connection.joins and self.finished:
            connection.send(LEAVE_FINISHED_RUN)
        self.arrived.add(rank)
        if not self.generation_number and len(self.arrived) == self.size:
            self._start_first_generation()

    def _start_first_generation(self) -> None:
        """Start the first generation once every rank has connected, although some ranks may already be lost."""
        self.generation_number = 1
        self.members = sorted(self.connected_ranks)
        self.lost = self.absent_ranks
        if self.lost:
            self._end_generation()
        self._form_generation_if_ready()

    def _answer_store_requests(self) -> None:
        for connection in self.connections:
            if connection.awaited_keys and all(key in self.store for key in connection.awaited_keys):
                values = [self.store[key] for key in connection.awaited_keys]
                connection.send({"values": values})
                connection.awaited_keys = []

    def _drop_connection(self, connection: RankConnection) -> None:
        """Close a connection, and end the generation if a member is lost."""
        if connection not in self.connections:
            return
        self.connections.discard(connection)
        self.selector.unregister(connection.socket)
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_RDWR)  # ranks that were forked later have copies of the socket
        connection.socket.close()
        self._remove_member(connection, failed=not connection.has_left)

    def _remove_member(self, connection: RankConnection, *, failed: bool) -> None:
        """Remove the rank of a connection from the members, if the rank is a member.

        A failure ends the generation, and the failure of an irreplaceable rank ends the run. Removing the same rank a
        second time has no effect.
        """
        if failed and connection.irreplaceable and not self.finished:
            self.end_reason = EndReason.SHARD_LOST
        if connection.rank in self.members and not connection.joins and not self.finished:
            self.members.remove(connection.rank)
            if failed:
                self.lost.append(connection.rank)
                self._end_generation()
        self._form_generation_if_ready()

    def _count_rank_as_lost(self, connection: RankConnection) -> None:
        """Count a rank as lost although it has left in an orderly way, because a failure made the rank leave."""
        if connection.has_left and not self.finished:
            connection.has_left = False
            self.lost.append(connection.rank)
            self._end_generation()
            self._form_generation_if_ready()

    def _announce_join(self, connection: RankConnection) -> None:
        """Notify the members that a rank is waiting to join.

        After all members have been notified, they leave their generation together, between two steps.
        """
        if self.finished:
            connection.send(LEAVE_FINISHED_RUN)
        elif self.is_active and not self.generation_ended:
            for member in self.connections:
                if not member.joins:
                    member.send({"join": True})

    def _end_generation(self) -> None:
        """Notify all members that their generation has ended.

        Without this notification, the collectives of the members would never end.
        """
        if self.generation_ended or not self.is_active:
            return
        self.generation_ended = True
        for connection in self.connections:
            connection.awaited_keys = []
            if not connection.joins:
                connection.send({"over": self.generation_number})

    def _form_generation_if_ready(self) -> None:
        """Form the next generation once all live members have signed in, or finish if all members are done."""
        members = [member for member in self.connections if not member.joins and member.rank in self.members]
        requests = [member.sign_in for member in members if member.sign_in]
        if not self.is_active or not members or len(requests) < len(members):
            return
        if not self.generation_ended and all(request["done"] for request in requests):
            self.finished = True
            for connection in self.connections:
                connection.send(LEAVE_FINISHED_RUN if connection.joins else {"generation": {"done": True}})
            return
        joined = [connection for connection in self.connections if connection.joins and connection.sign_in]
        self._form_generation(sorted([*members, *joined], key=lambda connection: connection.rank))

    def _form_generation(self, connections: Sequence[RankConnection]) -> None:
        """Form a generation of the given ranks, which then copy the newest training state.

        If no rank has a training state, the run cannot continue, and `end_reason` is set instead.
        """
        progress = [connection.sign_in["progress"] for connection in connections if connection.sign_in]
        newest = max(progress)
        if newest[0] < 0:
            self.end_reason = EndReason.STATE_LOST
            return
        self.generation_number += 1
        self.members = [connection.rank for connection in connections]
        self.generation_ended = False
        self.below_minimum |= len(connections) < self.settings.min
        generation = {
            "number": self.generation_number,
            "members": self.members,
            "source": progress.index(newest),
            "copies": any(steps != newest for steps in progress),
            "lost": self.lost,
            "joined": [connection.rank for connection in connections if connection.joins],
            "stops": self.below_minimum,
        }
        self.lost = []
        self.store = {}
        for connection in connections:
            connection.sign_in = None
            connection.joins = False
            connection.awaited_keys = []
        for connection in connections:
            connection.send({"generation": generation})
