"""Coordinator of an elastic run: it knows which ranks live, and forms a new generation when one is lost or joins.

It runs in the launcher, never in a rank, and loads no torch. Each rank has one connection to it, which carries
heartbeats, the rank's message that its step has failed, and the addresses by which the ranks of a generation connect.
Messages are JSON objects, one a line.
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import json
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from common.distributed.elastic.member import send_at_once
from configs.elastic import Elastic

LONGEST = 1 << 20  # bytes of a line; a member sends far less
FIRST = 1 << 12  # bytes of the first one
STRANGERS = 16  # connections beside two for each rank
OVER = {"leave": "the run is over"}


class Broken(enum.Enum):
    """Reason why the ranks that are left cannot continue the run."""

    SHARD_LOST = "that rank alone had a part of the state: elastic=true cannot go on without it"
    STATE_LOST = (
        "no rank is left that has the state of the run: all that had it were lost before a new rank had a complete copy"
    )


@dataclass(eq=False)
class Connection:
    """The connection of a member."""

    socket: socket.socket
    heard: float
    pid: int = 0
    member: int = -1
    """The rank's number at the start of the run; -1 until it has said so."""
    joins: bool = False
    """True for a rank that was started again, until it belongs to a generation."""
    irreplaceable: bool = False
    """True for a rank without which the others cannot go on."""
    received: bytes = b""
    signed: dict[str, Any] | None = None
    """Its request for a new generation: `progress`; `done` where it has nothing left to do; `together` where all
    leave this one after the same step. `progress` begins with the steps done, -1 for a rank without the state."""
    wanted: list[str] = field(default_factory=list)
    """Keys of the store that it waits for."""
    left: bool = False
    """True once nobody waits for it any more; the connection lasts as long as the process."""

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to a rank, if it still reads any."""
        if self.member >= 0:
            with contextlib.suppress(OSError):
                self.socket.sendall(json.dumps(message).encode() + b"\n")


class Coordinator:
    """Coordinator of one run. The launcher calls `poll_members` again and again; everything happens in there.

    Losses count once all ranks have come, and until all are done: before and after, the launcher ends the run.
    """

    def __init__(self, listener: socket.socket, size: int, settings: Elastic, key: str = "") -> None:
        self.listener, self.size, self.settings, self.key = listener, size, settings, key
        self.selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ)
        self.connections: set[Connection] = set()
        self.number = 0
        self.came: set[int] = set()
        self.members: list[int] = []
        """Members of the newest generation that live."""
        self.over = False
        """True from the first failure in a generation until the next one is formed."""
        self.finished = False
        self.broken: Broken | None = None
        """Why the ranks that are left cannot continue: the launcher ends the run."""
        self.stops = False
        """True once too few members are left."""
        self.lost: list[int] = []
        """Members lost since the newest generation was formed."""
        self.reasons: dict[int, str] = {}
        """Of a rank whose newest process has ended itself, or was given up: that it has, and the cause."""
        self.store: dict[str, str] = {}
        self.polled = time.monotonic()
        self.on_silence: Callable[[int], None] = lambda member: None
        """Called with a member that is lost because it does not answer."""

    @property
    def is_active(self) -> bool:
        """True while the loss of a rank does not end the run."""
        return bool(self.members) and not self.finished and not self.broken

    @property
    def vacant(self) -> list[int]:
        """Ranks that are missing in a generation that works."""
        return [] if not self.is_active or self.over else sorted(set(range(self.size)) - self.present)

    @property
    def present(self) -> set[int]:
        """Ranks that have a connection."""
        return {connection.member for connection in self.connections} - {-1}

    @property
    def newcomers(self) -> set[int]:
        """Ranks that were started again and wait to belong to a generation."""
        return {connection.member for connection in self.connections if connection.joins}

    def find_end(self) -> Broken | None:
        """Find out why the run ends where a rank was killed; None where that ends any run."""
        if self.broken or self.finished or not self.number:
            return self.broken
        return None if self.members else Broken.STATE_LOST

    def find_pid(self, member: int) -> int:
        """Return the process id of a member, as its host counts; 0 for one that is not there."""
        return next((connection.pid for connection in self.connections if connection.member == member), 0)

    def poll_members(self, seconds: float) -> bool:
        """Wait at most so long for messages, and answer them; then look for members that are silent.

        Returns whether there were any.
        """
        ready = self.selector.select(seconds)
        for key, _ in ready:
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)
        now = time.monotonic()
        stalled = now - self.polled > self.settings.timeout / 2  # this process stood still: nobody else is to blame
        self.polled = now
        for connection in list(self.connections):
            if stalled:
                connection.heard = now
            elif now - connection.heard > self.settings.timeout:
                if connection.member >= 0 and not connection.left:
                    self.reasons[connection.member] = f"was given up: no heartbeat for {self.settings.timeout:g} s"
                    self.on_silence(connection.member)
                self._drop(connection)
        return bool(ready)

    def note_ended_member(self, member: int) -> bool:
        """Note that a member's process has ended; return False where the run cannot go on without it."""
        for _ in range(100):  # what came before its end counts; strangers may go on sending
            if not self.poll_members(0):
                break
        for connection in [connection for connection in self.connections if connection.member == member]:
            self._drop(connection)
        return self.is_active

    def close(self) -> None:
        """Close all connections, also in a forked child that inherits them."""
        for connection in self.connections:
            connection.socket.close()
        self.listener.close()
        self.selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            accepted, _ = self.listener.accept()
            if len(self.connections) > 2 * self.size + STRANGERS:
                accepted.close()
                return
            accepted.settimeout(1.0)  # for sending; it is read only when there is something
            send_at_once(accepted)
            connection = Connection(accepted, time.monotonic())
            self.connections.add(connection)
            self.selector.register(accepted, selectors.EVENT_READ, connection)

    def _read(self, connection: Connection) -> None:
        try:
            part = connection.socket.recv(1 << 16)
        except OSError:
            part = b""
        connection.received += part
        if connection.member >= 0:  # others have to say who they are
            connection.heard = time.monotonic()
        *complete, connection.received = connection.received.split(b"\n")
        if not part or len(connection.received) > (LONGEST if connection.member >= 0 else FIRST):
            self._drop(connection)
            return
        for text in complete:
            try:
                self._answer(connection, json.loads(text))
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):  # a stranger
                self._drop(connection)
                return

    def _answer(self, connection: Connection, message: dict[str, Any]) -> None:
        if "hello" in message:
            self._greet(connection, message)
        elif connection.member < 0:
            raise ValueError
        elif "sign_in" in message:
            connection.signed = message["sign_in"]
            if connection.joins:
                self._announce_join(connection)
            elif not connection.signed["done"] and not connection.signed["together"]:
                self._end_generation()
            self._try_to_form()
        elif "set" in message:
            self.store[message["set"]] = message["value"]
            self._serve_store()
        elif "get" in message:
            connection.wanted = message["get"]
            self._serve_store()
        elif "lost" in message:
            self.reasons[connection.member] = str(message["lost"])
            self._count_as_lost(connection)
        elif "bye" in message:
            connection.left = True
            self._remove_member(connection, failed=False)

    def _greet(self, connection: Connection, message: dict[str, Any]) -> None:
        """Take a connection for that of a rank. Raises ValueError where it is not, or has another one already."""
        member, pid = int(message["hello"]), int(message["pid"])
        if not hmac.compare_digest(str(message["key"]).encode(), self.key.encode()):
            raise ValueError
        if pid < 2 or member not in range(self.size) or member in self.present:
            raise ValueError
        connection.member, connection.joins, connection.pid = member, bool(message["joins"]), pid
        connection.irreplaceable = bool(message["irreplaceable"])
        connection.heard = time.monotonic()
        self.reasons.pop(member, None)
        if connection.joins and self.finished:
            connection.send(OVER)
        self.came.add(connection.member)
        if not self.number and len(self.came) == self.size:
            self.number, self.members = 1, sorted({one.member for one in self.connections} - {-1})
            self.lost = [rank for rank in range(self.size) if rank not in self.members]
            if self.lost:
                self._end_generation()
            self._try_to_form()

    def _serve_store(self) -> None:
        for connection in self.connections:
            if connection.wanted and all(key in self.store for key in connection.wanted):
                connection.send({"values": [self.store[key] for key in connection.wanted]})
                connection.wanted = []

    def _drop(self, connection: Connection) -> None:
        """Forget a connection; if it is that of a member of this generation, the generation is over."""
        if connection not in self.connections:
            return
        self.connections.discard(connection)
        self.selector.unregister(connection.socket)
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_RDWR)  # a rank that was forked since has a copy, too
        connection.socket.close()
        self._remove_member(connection, failed=not connection.left)

    def _remove_member(self, connection: Connection, *, failed: bool) -> None:
        if failed and connection.irreplaceable and not self.finished:
            self.broken = Broken.SHARD_LOST
        if connection.member in self.members and not connection.joins and not self.finished:
            self.members.remove(connection.member)
            if failed:
                self.lost.append(connection.member)
                self._end_generation()
        self._try_to_form()

    def _count_as_lost(self, connection: Connection) -> None:
        """Count a rank as lost that has left orderly before, on its way out of the failure that ends it."""
        if connection.left and not self.finished:
            connection.left = False
            self.lost.append(connection.member)
            self._end_generation()
            self._try_to_form()

    def _announce_join(self, connection: Connection) -> None:
        """Tell the members that a rank waits: once all know it they leave together, between two steps."""
        if self.finished:
            connection.send(OVER)
        elif self.is_active and not self.over:
            for member in self.connections:
                if not member.joins:
                    member.send({"join": True})

    def _end_generation(self) -> None:
        """Tell all members that their generation is over: their collectives will not end otherwise."""
        if self.over or not self.is_active:
            return
        self.over = True
        for connection in self.connections:
            connection.wanted = []
            if not connection.joins:
                connection.send({"over": self.number})

    def _try_to_form(self) -> None:
        """Form the next generation if all members that live have signed in; let them end if all are done.

        Without a member that has the state there is none: the others would begin at step 0.
        """
        connections = [
            connection for connection in self.connections if connection.member in self.members and not connection.joins
        ]
        if not self.is_active or not connections or not all(connection.signed for connection in connections):
            return
        if not self.over and all(connection.signed["done"] for connection in connections if connection.signed):
            self.finished = True
            for connection in self.connections:
                connection.send(OVER if connection.joins else {"generation": {"done": True}})
            return
        joined = [connection for connection in self.connections if connection.joins and connection.signed]
        connections = sorted([*connections, *joined], key=lambda connection: connection.member)
        progress = [connection.signed["progress"] for connection in connections if connection.signed]
        newest = max(progress)
        if newest[0] < 0:
            self.broken = Broken.STATE_LOST
            return
        self.number, self.members, self.over = self.number + 1, [connection.member for connection in connections], False
        self.stops |= len(connections) < self.settings.min
        generation = {
            "number": self.number,
            "members": self.members,
            "source": progress.index(newest),
            "copies": any(one != newest for one in progress),
            "lost": self.lost,
            "joined": [connection.member for connection in joined],
            "stops": self.stops,
        }
        self.lost, self.store = [], {}
        for connection in connections:
            connection.signed, connection.joins, connection.wanted = None, False, []
        for connection in connections:
            connection.send({"generation": generation})
