"""Accepting the connections of the other ranks, and theirs only. Imports no torch.

One thread waits for all at once. Whoever does not prove within two seconds that it is a rank of this group is closed
and named; of more than 64 at a time the oldest goes. So strangers cannot delay a rank by more than these two seconds,
nor end it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from common.core.errors import Unreachable
from common.distributed.transport.certificates import Identity, check_peer, describe_refusal
from common.distributed.transport.socket_stream import TlsSocket
from common.distributed.transport.welcome import (
    LENGTH,
    Direction,
    Stranger,
    make_answer,
    parse_hello,
    parse_length,
)

SECONDS = 2.0  # until a guest must have proven who it is
GUESTS = 64  # at a time
BACKLOG = 1024  # connections that wait for their turn in the kernel; more would try again a second later
TOLD = 20  # strangers' addresses that are printed
PAUSE = 0.05  # seconds between two looks at the clock


@dataclass(eq=False)
class Guest:
    """A connection that has not yet proven whose it is."""

    socket: socket.socket
    host: str
    where: str
    deadline: float
    shaken: bool
    """True when the TLS handshake is over, or without TLS."""
    received: bytearray = field(default_factory=bytearray)


class Reception:
    """The open port of a rank, until all other ranks have connected to it."""

    def __init__(
        self, group: str, rank: int, size: int, *, token: bytes, address: str, is_local: bool,
        identity: Identity | None, tell: Callable[[str], object],
    ) -> None:  # fmt: skip
        self.group, self.rank, self.size, self.token = group, rank, size, token
        self.identity, self.tell = identity, tell
        self.arrived: dict[int, socket.socket] = {}
        self._guests: dict[socket.socket, Guest] = {}  # oldest first
        self._told: set[str] = set()
        self._closing = False
        self._selector = selectors.DefaultSelector()
        listener = socket.create_server((address, 0), backlog=BACKLOG)
        self.port: int = listener.getsockname()[1]
        self.local = secrets.token_hex(16) if is_local else ""
        """Abstract name of the Unix socket for ranks of this host, empty if there is none."""
        self._listeners = [listener]
        if is_local:
            self._listeners.append(socket.socket(socket.AF_UNIX))
            self._listeners[1].bind("\0" + self.local)
            self._listeners[1].listen(BACKLOG)
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._receive_all, name="reception", daemon=True)
        self._thread.start()

    def wait_for_ranks(self, deadline: float) -> dict[int, socket.socket]:
        """Return the connection of each other rank. Raises Unreachable naming those that have not come by then."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        absent = [str(rank) for rank in range(self.size) if rank != self.rank and rank not in self.arrived]
        if absent:
            raise Unreachable(
                f"{'ranks' if len(absent) > 1 else 'rank'} {', '.join(absent)} did not connect to rank {self.rank} in "
                f"time; see the logs there, check the firewall for port {self.port}, or raise launch.setup_timeout"
            )
        arrived, self.arrived = self.arrived, {}
        return arrived

    def close(self) -> None:
        """Close the port and all connections that nobody has taken."""
        self._closing = True
        self._thread.join()
        for connection in self.arrived.values():
            connection.close()

    def _receive_all(self) -> None:
        with self._selector:
            while len(self.arrived) < self.size - 1 and not self._closing:
                for key, _ in self._selector.select(PAUSE):
                    if key.data is None:
                        self._admit_guest(cast(socket.socket, key.fileobj))
                    elif key.data.socket in self._guests:  # not sent away a moment ago
                        self._read_guest(key.data)
                for guest in [guest for guest in self._guests.values() if guest.deadline < time.monotonic()]:
                    self._refuse_guest(guest, f"had not proven within {SECONDS:g} s that it is a rank of this run")
            for guest in list(self._guests.values()):
                self._remove_guest(guest).close()
        for listener in self._listeners:
            listener.close()

    def _admit_guest(self, listener: socket.socket) -> None:
        if len(self._guests) >= GUESTS:
            self._refuse_guest(next(iter(self._guests.values())), f"is one of more than {GUESTS} that say nothing")
        try:
            connection, address = listener.accept()
        except OSError as error:  # it has left, or no more files can be opened
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(PAUSE)
            return
        connection.setblocking(False)
        is_local = connection.family == socket.AF_UNIX
        host, where = ("this host", "this host") if is_local else (address[0], f"{address[0]}:{address[1]}")
        guest = Guest(connection, host, where, time.monotonic() + SECONDS, shaken=is_local or self.identity is None)
        try:
            if not guest.shaken:
                assert self.identity
                guest.socket = TlsSocket(connection, self.identity.server, server_side=True)
            self._selector.register(guest.socket, selectors.EVENT_READ, guest)
        except (OSError, ValueError):
            guest.socket.close()
            return
        self._guests[guest.socket] = guest
        # what TLS does between hosts the kernel does within one
        if is_local and read_peer_user_id(connection) != os.getuid():
            self._refuse_guest(guest, "belongs to another user")
            return
        self._read_guest(guest)

    def _read_guest(self, guest: Guest) -> None:
        """Read what a guest has sent so far; accept or refuse it where that is enough to judge."""
        try:
            if not guest.shaken:
                assert self.identity and isinstance(guest.socket, TlsSocket)
                guest.socket.do_handshake()
                check_peer(guest.socket, self.identity)
                guest.shaken = True
            self._read_until(guest, LENGTH.size)
            self._read_until(guest, LENGTH.size + parse_length(bytes(guest.received[: LENGTH.size])))
            self._accept_guest(guest)
        except BlockingIOError:
            return  # more is to come
        except Stranger as error:
            self._refuse_guest(guest, str(error))
        except Exception as error:  # noqa: BLE001 (whatever a stranger sends, this rank goes on)
            self._refuse_guest(guest, describe_refusal(error))

    def _read_until(self, guest: Guest, wanted: int) -> None:
        """Read until `wanted` bytes are there, and not further: messages may follow."""
        while len(guest.received) < wanted:
            data = guest.socket.recv(wanted - len(guest.received))
            if not data:
                raise Stranger("left before it had said who it is")
            guest.received += data

    def _accept_guest(self, guest: Guest) -> None:
        source = parse_hello(bytes(guest.received[LENGTH.size :]), self.group, self.rank, self.token)
        if source in self.arrived or not 0 <= source < self.size or source == self.rank:
            raise Stranger(f"says that it is rank {source}, which is here already")
        guest.socket.sendall(make_answer(Direction(self.group, source, self.rank), self.token))
        self.arrived[source] = self._remove_guest(guest)

    def _refuse_guest(self, guest: Guest, reason: str) -> None:
        if guest.host not in self._told and len(self._told) < TOLD:
            self._told.add(guest.host)
            with contextlib.suppress(OSError):
                self.tell(
                    f"rank {self.rank} refused a connection from {guest.where}, which {reason}; "
                    "others from there are not mentioned"
                )
        self._remove_guest(guest).close()

    def _remove_guest(self, guest: Guest) -> socket.socket:
        self._selector.unregister(guest.socket)
        return self._guests.pop(guest.socket).socket


def read_peer_user_id(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket, as the kernel knows it."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)
