"""TLS on the sockets between ranks. This module does not import torch."""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

from common.ranks.links.socket_stream import (
    EAGER_BYTES,
    EMPTY_VIEW,
    HEADER,
    PIECE_BYTES,
    SMALL_BYTES,
    FinishWrite,
    SocketStream,
    copy_if_small,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

T = TypeVar("T")


class TlsSocket(socket.socket):
    """A TLS connection over an already connected socket. This class is not thread-safe.

    This object takes over the file descriptor of `connection`. Unlike ssl.SSLSocket, which makes one system call per
    record of 16 kB, this class passes many records to each call.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, server_side: bool = False) -> None:
        timeout = connection.gettimeout()
        super().__init__(fileno=connection.detach())
        self.settimeout(timeout)
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._records = memoryview(bytearray(PIECE_BYTES))

    def do_handshake(self) -> None:
        """Perform the TLS handshake. Raises ssl.SSLError.

        On a non-blocking socket, this method may raise BlockingIOError and must then be called again.
        """
        self._call_until_complete(self._tls.do_handshake)
        self._send_pending_records()

    def get_certificate(self) -> bytes | None:
        """Return the peer's certificate in DER encoding, or None if the peer presented no certificate."""
        return self._tls.getpeercert(binary_form=True)

    def version(self) -> str | None:
        """Return the version of the TLS protocol."""
        return self._tls.version()

    def encrypt(self, data: ReadableBuffer) -> bytes:
        """Encrypt `data`. The encrypted bytes must be sent in the order of the calls."""
        self._tls.write(data)
        return self._outgoing.read()

    def sendall(self, data: ReadableBuffer, flags: int = 0) -> None:
        super().sendall(self.encrypt(data), flags)

    def recv(self, count: int, flags: int = 0) -> bytes:
        try:
            return self._call_until_complete(self._tls.read, count)
        except ssl.SSLEOFError:
            return b""

    def recv_into(self, target: WriteableBuffer, count: int = 0, flags: int = 0) -> int:
        """Read at most one TLS record, even with MSG_WAITALL, and return the number of bytes read."""
        try:
            limit = count or len(memoryview(target))
            return cast(int, self._call_until_complete(self._tls.read, limit, target))
        except ssl.SSLEOFError:
            return 0

    def _call_until_complete(self, call: Callable[..., T], *arguments: object) -> T:
        """Repeat a method call on the TLS object, receiving records until the call completes."""
        while True:
            try:
                return call(*arguments)
            except ssl.SSLWantReadError:
                self._send_pending_records()
                received = super().recv_into(self._records)
                if received:
                    self._incoming.write(self._records[:received])
                else:
                    self._incoming.write_eof()
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._send_pending_records()  # sends the TLS alert, so that the peer can log the reason
                raise

    def _send_pending_records(self) -> None:
        if self._outgoing.pending:
            super().sendall(self._outgoing.read())


class TlsStream(SocketStream):
    """One end of a TLS connection that carries messages in one direction."""

    def __init__(self, tls_socket: TlsSocket, timeout: float) -> None:
        super().__init__(tls_socket, timeout)
        self.tls_socket = tls_socket

    def begin_message(self, tag: int, data: memoryview) -> FinishWrite | None:
        """Start writing a message without blocking.

        Return a function that writes the remaining bytes and may block, or None if no bytes remain.
        """
        header = HEADER.pack(tag, len(data))
        tls_socket = self.tls_socket
        encrypted = tls_socket.encrypt(header + data[:SMALL_BYTES])
        remaining = data[SMALL_BYTES:]
        deferred_bytes = max(0, len(data) - EAGER_BYTES)
        while (sent := self.write_without_blocking(encrypted)) == len(encrypted) and len(remaining) > deferred_bytes:
            encrypted = tls_socket.encrypt(remaining[:PIECE_BYTES])
            remaining = remaining[PIECE_BYTES:]
        unsent = encrypted[sent:]
        if not unsent and not remaining:
            return None
        return functools.partial(self.write_remainder, unsent, EMPTY_VIEW, copy_if_small(remaining))
