"""One end of a connection between two ranks: how messages become bytes of a socket, plain or TLS. Imports no torch."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import ssl
import struct
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

HEADER = struct.Struct("<QQ")  # tag and bytes of a message
SMALL = 1 << 16  # bytes up to which a message is copied where the kernel does not take it at once
EAGER = 1 << 20  # bytes of it that the caller writes if the kernel takes them: waking a thread may take milliseconds
PIECE = 1 << 18  # bytes of a large message that are handled at once: they stay in a core's cache
Rest = Callable[[], None]


def pack_seconds(seconds: float) -> bytes:
    """Return a time limit as the kernel takes it."""
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


def keep_small(data: memoryview) -> memoryview:
    """Return a copy of at most SMALL bytes, whose memory the caller may change at once; more as they are."""
    return data if len(data) > SMALL else memoryview(bytes(data))


OPEN: weakref.WeakSet[SocketStream] = weakref.WeakSet()


def close_inherited_sockets() -> None:
    """Close the sockets that a forked process has inherited: a connection would outlive its rank."""
    for stream in OPEN:
        stream.close()


os.register_at_fork(after_in_child=close_inherited_sockets)


class SocketStream:
    """One end of a connection, plain or TLS, on which messages go in one direction."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self.socket, self.timeout = connection, timeout
        self.encrypted = isinstance(connection, ssl.SSLSocket)
        self._scratch = bytearray()
        OPEN.add(self)
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.encrypted:  # Python repeats without end a TLS read that the kernel's time limit has ended
            connection.settimeout(timeout)
            return
        connection.settimeout(None)  # with a limit of Python's own, each call would poll first
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, pack_seconds(timeout))

    # ---- writing

    def begin_message(self, tag: int, data: memoryview) -> Rest | None:
        """Write what needs no waiting; return what writes the rest and may block, None if nothing is left."""
        header = HEADER.pack(tag, len(data))
        if self.encrypted and len(data) > SMALL:  # after a partial write TLS wants the same bytes again
            return functools.partial(self._write_large, header, data)
        sent = self._write_now(header, data[:EAGER])
        if sent < len(header):
            return functools.partial(self._write_large, header[sent:], keep_small(data))
        rest = data[sent - len(header) :]
        return functools.partial(self._write_all, keep_small(rest)) if rest else None

    def _write_now(self, *parts: ReadableBuffer) -> int:
        """Return how many bytes the kernel took at once."""
        try:
            if not self.encrypted:
                return self.socket.sendmsg(parts, [], socket.MSG_DONTWAIT)
            self.socket.settimeout(0)
            try:
                return self.socket.send(b"".join(parts))
            finally:
                self.socket.settimeout(self.timeout)
        except (BlockingIOError, ssl.SSLWantWriteError):
            return 0

    def _write_large(self, header: bytes, data: memoryview) -> None:
        self._write_all(memoryview(header + data[:SMALL]))  # no packet for the header alone
        self._write_all(data[SMALL:])

    def _write_all(self, data: memoryview) -> None:
        for begin in range(0, len(data), PIECE):  # the time limit counts for a call
            self.socket.sendall(data[begin : begin + PIECE])

    # ---- reading

    def read_header(self, patient: bool = False) -> tuple[int, int]:
        """Wait for a message, without a time limit if `patient`; return its tag and length. Raises EOFError."""
        header = self.read_some(HEADER.size, patient)
        while len(header) < HEADER.size:
            header += self.read_some(HEADER.size - len(header))
        tag, length = HEADER.unpack(header)
        return tag, length

    def read_some(self, count: int, patient: bool = False) -> bytes:
        """Wait for at most `count` bytes, at least one. Raises EOFError if the other side has closed."""
        while True:
            try:
                data = self.socket.recv(count)
            except (BlockingIOError, TimeoutError):
                if patient:
                    continue
                raise
            if not data:
                raise EOFError
            return data

    def read_into(self, target: memoryview) -> None:
        """Fill `target`. Raises EOFError if the other side closes before."""
        flags = 0 if self.encrypted else socket.MSG_WAITALL
        while len(target):
            count = self.socket.recv_into(target, 0, flags)
            if not count:
                raise EOFError
            target = target[count:]

    def read_pieces(self, length: int) -> Iterator[memoryview]:
        """Yield `length` bytes in pieces, all but the last of PIECE bytes, each valid until the next one."""
        if len(self._scratch) < min(length, PIECE):
            self._scratch = bytearray(PIECE)
        scratch = memoryview(self._scratch)
        for begin in range(0, length, PIECE):
            piece = scratch[: min(PIECE, length - begin)]
            self.read_into(piece)
            yield piece

    # ---- the end

    def end_calls(self) -> None:
        """End what any thread reads or writes here."""
        with contextlib.suppress(OSError):  # the other side was faster
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)  # SSLSocket's own lets a reader take TLS for data

    def close(self) -> None:
        """Give the socket back; no thread may be reading or writing."""
        self.socket.close()
