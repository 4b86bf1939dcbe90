"""Accept connections from the other ranks of a group and reject all others. This module does not import torch.

One thread serves all connections. A peer must prove within two seconds that it is a rank of this group; otherwise, the
connection is closed and the address of the peer is printed. If more than 64 connections are pending, the oldest one is
closed. Therefore, connections from other programs can neither stop a rank nor delay the rank by more than two seconds.
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

from common.ranks.links.encryption import Encryption
from common.ranks.links.welcome import (
    HELLO_HEADER,
    ConnectionId,
    UntrustedPeer,
    make_hello_answer,
    parse_hello,
    parse_hello_length,
)
from common.system.errors import UnreachableError, summarize_error

HANDSHAKE_SECONDS = 2.0  # time limit for a handshake
MAX_PENDING = 64  # maximum number of connections with an incomplete handshake
BACKLOG = 1024  # length of the kernel's queue of new connections; if it is full, a peer retries only after 1 s
MAX_PRINTED_HOSTS = 20  # maximum number of hosts whose rejected connections are printed
POLL_SECONDS = 0.05  # interval between two checks of the deadlines
Warn = Callable[[str], object]  # prints a warning


@dataclass(eq=False)
class PendingConnection:
    """A connection whose peer has not yet proven its identity."""

    socket: socket.socket
    host: str
    address: str
    deadline: float
    is_encrypted: bool
    """Whether the TLS handshake is complete; always true without TLS."""
    received: bytearray = field(default_factory=bytearray)


class RankAcceptor:
    """Acceptor that keeps a rank's port open until all other ranks have connected."""

    def __init__(
        self, group: str, rank: int, size: int, *, token: bytes, address: str, is_local: bool,
        identity: Encryption | None, warn: Warn,
    ) -> None:  # fmt: skip
        self.group = group
        self.rank = rank
        self.size = size
        self.token = token
        self.identity = identity
        self.warn = warn
        self.accepted: dict[int, socket.socket] = {}
        self._pending: dict[socket.socket, PendingConnection] = {}  # oldest first
        self._printed_hosts: set[str] = set()
        self._closing = False
        self._selector = selectors.DefaultSelector()
        listener = socket.create_server((address, 0), backlog=BACKLOG)
        self.port: int = listener.getsockname()[1]
        self.unix_socket_name = secrets.token_hex(16) if is_local else ""
        """Abstract name of the Unix socket for ranks on this host; empty if there is no such socket."""
        self._listeners = [listener]
        if is_local:
            unix_listener = socket.socket(socket.AF_UNIX)
            unix_listener.bind("\0" + self.unix_socket_name)
            unix_listener.listen(BACKLOG)
            self._listeners.append(unix_listener)
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._accept_ranks, name="reception", daemon=True)
        self._thread.start()

    def wait_for_ranks(self, deadline: float) -> dict[int, socket.socket]:
        """Wait until all other ranks have connected and return their connections, by rank.

        `deadline` is a time on the clock of `time.monotonic`, in seconds. Raises UnreachableError if ranks are missing
        at this time. The error message names the missing ranks.
        """
        self._thread.join(max(0.0, deadline - time.monotonic()))
        peers = [rank for rank in range(self.size) if rank != self.rank]
        absent = [str(rank) for rank in peers if rank not in self.accepted]
        if absent:
            noun = "ranks" if len(absent) > 1 else "rank"
            raise UnreachableError(
                f"{noun} {', '.join(absent)} did not connect to rank {self.rank} in time; see the log of each missing "
                f"rank, check that the firewall allows port {self.port}, or raise launch.setup_timeout"
            )
        accepted = self.accepted
        self.accepted = {}
        return accepted

    def close(self) -> None:
        """Close the port and all connections that `wait_for_ranks` has not returned."""
        self._closing = True
        self._thread.join()
        for connection in self.accepted.values():
            connection.close()

    def _accept_ranks(self) -> None:
        with self._selector:
            while len(self.accepted) < self.size - 1 and not self._closing:
                for key, _ in self._selector.select(POLL_SECONDS):
                    if key.data is None:
                        self._accept_connection(cast(socket.socket, key.fileobj))
                    elif key.data.socket in self._pending:  # an earlier event has not closed the connection
                        self._continue_handshake(key.data)
                self._reject_overdue_connections()
            for pending in list(self._pending.values()):
                self._remove_pending(pending).close()
        for listener in self._listeners:
            listener.close()

    def _reject_overdue_connections(self) -> None:
        now = time.monotonic()
        for pending in list(self._pending.values()):
            if pending.deadline < now:
                self._reject_connection(
                    pending, f"did not prove within {HANDSHAKE_SECONDS:g} s that it is a rank of this run"
                )

    def _accept_connection(self, listener: socket.socket) -> None:
        if len(self._pending) >= MAX_PENDING:
            oldest = next(iter(self._pending.values()))
            self._reject_connection(oldest, f"was still in the handshake when {MAX_PENDING} connections were pending")
        try:
            connection, address = listener.accept()
        except OSError as error:  # the peer has disconnected, or no more files can be opened
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(POLL_SECONDS)
            return
        connection.setblocking(False)
        is_local = connection.family == socket.AF_UNIX
        host = "this host" if is_local else address[0]
        pending = PendingConnection(
            connection,
            host,
            address=host if is_local else f"{host}:{address[1]}",
            deadline=time.monotonic() + HANDSHAKE_SECONDS,
            is_encrypted=is_local or self.identity is None,
        )
        try:
            if not pending.is_encrypted:
                assert self.identity
                pending.socket = self.identity.open_server(connection)
            self._selector.register(pending.socket, selectors.EVENT_READ, pending)
        except (OSError, ValueError):
            pending.socket.close()
            return
        self._pending[pending.socket] = pending
        # within a host, the kernel reports the user of the peer, so TLS is not needed
        if is_local and read_peer_user_id(connection) != os.getuid():
            self._reject_connection(pending, "belongs to another user")
            return
        self._continue_handshake(pending)

    def _continue_handshake(self, pending: PendingConnection) -> None:
        """Read the available bytes, and accept or reject the peer once the handshake is complete."""
        try:
            if not pending.is_encrypted:
                assert self.identity
                self.identity.continue_handshake(pending.socket)
                pending.is_encrypted = True
            self._read_bytes(pending, HELLO_HEADER.size)
            length = parse_hello_length(bytes(pending.received[: HELLO_HEADER.size]))
            self._read_bytes(pending, HELLO_HEADER.size + length)
            self._accept_rank(pending)
        except BlockingIOError:
            return  # the peer has not sent the complete handshake yet
        except UntrustedPeer as error:
            self._reject_connection(pending, str(error))
        except Exception as error:  # noqa: BLE001 (input from a peer must never stop this rank)
            self._reject_connection(pending, self._describe_failure(error))

    def _describe_failure(self, error: Exception) -> str:
        """Return why the handshake with a peer failed, as text that follows `the peer`."""
        tls_failure = self.identity.describe_failure(error) if self.identity else ""
        if tls_failure:
            return tls_failure
        if isinstance(error, ConnectionError):
            return "closed the connection before the handshake was complete"
        return f"caused an error during the handshake: {summarize_error(error)}"

    def _read_bytes(self, pending: PendingConnection, count: int) -> None:
        """Read until `count` bytes have been received in total, but no further, because messages may follow."""
        while len(pending.received) < count:
            data = pending.socket.recv(count - len(pending.received))
            if not data:
                raise UntrustedPeer("closed the connection before the handshake was complete")
            pending.received += data

    def _accept_rank(self, pending: PendingConnection) -> None:
        source = parse_hello(bytes(pending.received[HELLO_HEADER.size :]), self.group, self.rank, self.token)
        if source in self.accepted or source == self.rank or not 0 <= source < self.size:
            raise UntrustedPeer(f"claims to be rank {source}, which is already connected or does not exist")
        pending.socket.sendall(make_hello_answer(ConnectionId(self.group, source, self.rank), self.token))
        self.accepted[source] = self._remove_pending(pending)

    def _reject_connection(self, pending: PendingConnection, reason: str) -> None:
        if pending.host not in self._printed_hosts and len(self._printed_hosts) < MAX_PRINTED_HOSTS:
            self._printed_hosts.add(pending.host)
            with contextlib.suppress(OSError):
                self.warn(
                    f"rank {self.rank} rejected a connection from {pending.address}: the peer {reason}; further "
                    "rejected connections from this address are not reported"
                )
        self._remove_pending(pending).close()

    def _remove_pending(self, pending: PendingConnection) -> socket.socket:
        self._selector.unregister(pending.socket)
        return self._pending.pop(pending.socket).socket


def read_peer_user_id(connection: socket.socket) -> int:
    """Return the user ID of the peer of a Unix socket, as reported by the kernel."""
    _, user_id, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user_id)
