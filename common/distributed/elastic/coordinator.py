"""Coordinator of an elastic run: it knows which ranks live, and forms a new generation when one is lost or joins.

It runs in the launcher, never in a rank, and loads no torch. Each rank has one connection to it, which carries
heartbeats, the rank's word that its step has failed, and the addresses by which the ranks of a generation connect.
Messages are JSON objects, one a line.
"""

from __future__ import annotations

import contextlib
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


@dataclass(eq=False)
class Line:
    """The connection of a member."""

    socket: socket.socket
    heard: float
    pid: int = 0
    member: int = -1
    """The rank's number at the start of the run; -1 until it has said so."""
    joins: bool = False
    """True for a rank that was started again, until it belongs to a generation."""
    received: bytes = b""
    signed: dict[str, Any] | None = None
    """Its word that it wants a new generation: `progress`; `done` where it has nothing left to do; `together` where all
    leave this one after the same step."""
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
    """Coordinator of one run. The launcher calls `poll` again and again; everything happens in there.

    Losses count once all ranks have come, and until all are done: before and after, the launcher ends the run.
    """

    def __init__(self, listener: socket.socket, size: int, settings: Elastic, key: str = "") -> None:
        self.listener, self.size, self.settings, self.key = listener, size, settings, key
        self.selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ)
        self.lines: set[Line] = set()
        self.number = 0
        self.came: set[int] = set()
        self.members: list[int] = []
        """Members of the newest generation that live."""
        self.over = False
        """True from the first failure in a generation until the next one is formed."""
        self.finished = False
        self.stops = False
        """True once too few members are left."""
        self.lost: list[int] = []
        """Members lost since the newest generation was formed."""
        self.store: dict[str, str] = {}
        self.polled = time.monotonic()
        self.on_silence: Callable[[int], None] = lambda member: None
        """Called with a member that is lost because it does not answer."""

    @property
    def is_active(self) -> bool:
        """True while the loss of a rank does not end the run."""
        return bool(self.members) and not self.finished

    @property
    def vacant(self) -> list[int]:
        """Ranks that are missing in a generation that works."""
        return [] if not self.is_active or self.over else sorted(set(range(self.size)) - self.present)

    @property
    def present(self) -> set[int]:
        """Ranks that have a connection."""
        return {line.member for line in self.lines} - {-1}

    def find_pid(self, member: int) -> int:
        """Return the process id of a member, as its host counts; 0 for one that is not there."""
        return next((line.pid for line in self.lines if line.member == member), 0)

    def poll(self, seconds: float) -> bool:
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
        for line in list(self.lines):
            if stalled:
                line.heard = now
            elif now - line.heard > self.settings.timeout:
                if line.member >= 0 and not line.left:
                    self.on_silence(line.member)
                self._drop(line)
        return bool(ready)

    def lose(self, member: int) -> bool:
        """Note that a member's process has ended; return False where the run cannot go on without it."""
        for _ in range(100):  # what came before its end counts; strangers may go on sending
            if not self.poll(0):
                break
        for line in [line for line in self.lines if line.member == member]:
            self._drop(line)
        return self.is_active

    def close(self) -> None:
        """Close all connections, also in a forked child that inherits them."""
        for line in self.lines:
            line.socket.close()
        self.listener.close()
        self.selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self.listener.accept()
            if len(self.lines) > 2 * self.size + STRANGERS:
                connection.close()
                return
            connection.settimeout(1.0)  # for sending; it is read only when there is something
            send_at_once(connection)
            line = Line(connection, time.monotonic())
            self.lines.add(line)
            self.selector.register(connection, selectors.EVENT_READ, line)

    def _read(self, line: Line) -> None:
        try:
            part = line.socket.recv(1 << 16)
        except OSError:
            part = b""
        line.received += part
        if line.member >= 0:  # others have to say who they are
            line.heard = time.monotonic()
        *complete, line.received = line.received.split(b"\n")
        if not part or len(line.received) > (LONGEST if line.member >= 0 else FIRST):
            self._drop(line)
            return
        for text in complete:
            try:
                self._answer(line, json.loads(text))
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):  # a stranger
                self._drop(line)
                return

    def _answer(self, line: Line, message: dict[str, Any]) -> None:
        if "hello" in message:
            self._greet(line, message)
        elif line.member < 0:
            raise ValueError
        elif "sign_in" in message:
            line.signed = message["sign_in"]
            if line.joins:
                self._announce_join(line)
            elif not line.signed["done"] and not line.signed["together"]:
                self._end_generation()
            self._try_to_form()
        elif "set" in message:
            self.store[message["set"]] = message["value"]
            self._serve_store()
        elif "get" in message:
            line.wanted = message["get"]
            self._serve_store()
        elif "bye" in message:
            line.left = True
            self._remove_member(line, failed=False)

    def _greet(self, line: Line, message: dict[str, Any]) -> None:
        """Take a connection for that of a rank. Raises ValueError where it is not, or has another one already."""
        member, pid = int(message["hello"]), int(message["pid"])
        if not hmac.compare_digest(str(message["key"]).encode(), self.key.encode()):
            raise ValueError
        if pid < 2 or member not in range(self.size) or member in self.present:
            raise ValueError
        line.member, line.joins, line.pid = member, bool(message["joins"]), pid
        line.heard = time.monotonic()
        if line.joins and self.finished:
            line.send(OVER)
        self.came.add(line.member)
        if not self.number and len(self.came) == self.size:
            self.number, self.members = 1, sorted({one.member for one in self.lines} - {-1})
            self.lost = [rank for rank in range(self.size) if rank not in self.members]
            if self.lost:
                self._end_generation()
            self._try_to_form()

    def _serve_store(self) -> None:
        for line in self.lines:
            if line.wanted and all(key in self.store for key in line.wanted):
                line.send({"values": [self.store[key] for key in line.wanted]})
                line.wanted = []

    def _drop(self, line: Line) -> None:
        """Forget a connection; if it is that of a member of this generation, the generation is over."""
        if line not in self.lines:
            return
        self.lines.discard(line)
        self.selector.unregister(line.socket)
        with contextlib.suppress(OSError):
            line.socket.shutdown(socket.SHUT_RDWR)  # a rank that was forked since has a copy, too
        line.socket.close()
        self._remove_member(line, failed=not line.left)

    def _remove_member(self, line: Line, *, failed: bool) -> None:
        if line.member in self.members and not line.joins and not self.finished:
            self.members.remove(line.member)
            if failed:
                self.lost.append(line.member)
                self._end_generation()
        self._try_to_form()

    def _announce_join(self, line: Line) -> None:
        """Tell the members that a rank waits: once all know it they leave together, between two steps."""
        if self.finished:
            line.send(OVER)
        elif self.is_active and not self.over:
            for member in self.lines:
                if not member.joins:
                    member.send({"join": True})

    def _end_generation(self) -> None:
        """Tell all members that their generation is over: their collectives will not end otherwise."""
        if self.over or not self.is_active:
            return
        self.over = True
        for line in self.lines:
            line.wanted = []
            if not line.joins:
                line.send({"over": self.number})

    def _try_to_form(self) -> None:
        """Form the next generation if all members that live have signed in; let them end if all are done."""
        lines = [line for line in self.lines if line.member in self.members and not line.joins]
        if not self.is_active or not lines or not all(line.signed for line in lines):
            return
        if not self.over and all(line.signed["done"] for line in lines if line.signed):
            self.finished = True
            for line in self.lines:
                line.send(OVER if line.joins else {"generation": {"done": True}})
            return
        joined = [line for line in self.lines if line.joins and line.signed]
        lines = sorted([*lines, *joined], key=lambda line: line.member)
        progress = [line.signed["progress"] for line in lines if line.signed]
        newest = max(progress)
        self.number, self.members, self.over = self.number + 1, [line.member for line in lines], False
        self.stops |= len(lines) < self.settings.min
        generation = {
            "number": self.number,
            "members": self.members,
            "source": progress.index(newest),
            "copies": any(one != newest for one in progress),
            "lost": self.lost,
            "joined": [line.member for line in joined],
            "stops": self.stops,
        }
        self.lost, self.store = [], {}
        for line in lines:
            line.signed, line.joins, line.wanted = None, False, []
        for line in lines:
            line.send({"generation": generation})
