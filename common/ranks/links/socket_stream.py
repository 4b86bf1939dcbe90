"""Read and write messages through a socket. This module does not import torch."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import struct
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

EMPTY_VIEW = memoryview(bytearray())

HEADER = struct.Struct("<QQ")  # tag of a message, and its length in bytes
SMALL_BYTES = 1 << 16  # messages up to this size are copied if the kernel does not accept them immediately
EAGER_BYTES = 1 << 21  # the calling thread writes up to this size, because waking a thread can take milliseconds
PIECE_BYTES = 1 << 18  # large messages are processed in pieces of this size, which fit in a core's cache
FinishWrite = Callable[[], None]


def pack_timeval(seconds: float) -> bytes:
    """Convert a time limit in seconds to a C timeval, the format of socket options."""
    microseconds = int(seconds % 1 * 1e6)
    return struct.pack("ll", int(seconds), microseconds)


def copy_if_small(data: memoryview) -> memoryview:
    """Copy `data` if it has at most SMALL_BYTES bytes, and return longer data unchanged.

    The caller may reuse the memory of data that has been copied.
    """
    return data if len(data) > SMALL_BYTES else memoryview(bytes(data))


OPEN_STREAMS: weakref.WeakSet[SocketStream] = weakref.WeakSet()


def close_inherited_sockets() -> None:
    """Close the sockets that a forked process has inherited.

    If these sockets stayed open, a connection would remain open after its rank has exited.
    """
    for stream in OPEN_STREAMS:
        stream.close()


os.register_at_fork(after_in_child=close_inherited_sockets)


class SocketStream:
    """One end of a connection that carries messages in one direction."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self.socket = connection
        self.timeout = timeout
        self._scratch = bytearray()
        OPEN_STREAMS.add(self)
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)  # with a Python timeout, each call would first poll the socket
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, pack_timeval(timeout))

    # ---- writing

    def begin_message(self, tag: int, data: memoryview) -> FinishWrite | None:
        """Start writing a message without blocking.

        Return a function that writes the remaining bytes and may block, or None if no bytes remain.
        """
        header = HEADER.pack(tag, len(data))
        eager = data[:EAGER_BYTES]
        sent = self.write_without_blocking(header, eager)
        if sent == HEADER.size + len(data):
            return None
        unsent = copy_if_small(eager[max(0, sent - HEADER.size) :])
        deferred = copy_if_small(data[EAGER_BYTES:])
        return functools.partial(self.write_remainder, header[sent:], unsent, deferred)

    def write_without_blocking(self, *parts: ReadableBuffer) -> int:
        """Write without blocking and return the number of bytes that the kernel accepted."""
        try:
            return self.socket.sendmsg(parts, [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def write_remainder(self, encoded: bytes, unsent: memoryview, deferred: memoryview) -> None:
        """Write `encoded` (a header or encrypted bytes), then the remaining data.

        An encrypted socket encrypts the remaining data when it is written.
        """
        socket.socket.sendall(self.socket, encoded + unsent[:SMALL_BYTES])  # avoids a packet with only a header
        for data in (unsent[SMALL_BYTES:], deferred):
            for start in range(0, len(data), PIECE_BYTES):  # the time limit applies to each piece
                self.socket.sendall(data[start : start + PIECE_BYTES])

    # ---- reading

    def read_header(self, patient: bool = False) -> tuple[int, int]:
        """Wait for a message and return its tag and its length in bytes.

        If `patient` is true, there is no time limit for the start of the message. Raises EOFError if the peer closed
        the connection.
        """
        header = self.read_available_bytes(HEADER.size, patient)
        while len(header) < HEADER.size:
            header += self.read_available_bytes(HEADER.size - len(header))
        tag, length = HEADER.unpack(header)
        return tag, length

    def read_available_bytes(self, count: int, patient: bool = False) -> bytes:
        """Wait for data and return 1 to `count` bytes. Raises EOFError if the peer closed the connection."""
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

    def fill_buffer(self, target: memoryview) -> None:
        """Fill `target` with received bytes. Raises EOFError if the peer closes the connection first."""
        while len(target):
            count = self.socket.recv_into(target, 0, socket.MSG_WAITALL)
            if not count:
                raise EOFError
            target = target[count:]

    def read_pieces(self, length: int) -> Iterator[memoryview]:
        """Yield `length` received bytes in pieces of PIECE_BYTES. The last piece may be shorter.

        Each piece is valid only until the next piece is requested.
        """
        if len(self._scratch) < min(length, PIECE_BYTES):
            self._scratch = bytearray(PIECE_BYTES)
        scratch = memoryview(self._scratch)
        for start in range(0, length, PIECE_BYTES):
            piece = scratch[: min(PIECE_BYTES, length - start)]
            self.fill_buffer(piece)
            yield piece

    # ---- closing

    def interrupt_calls(self) -> None:
        """Make reads and writes that are blocked in any thread return."""
        with contextlib.suppress(OSError):  # the peer may already have closed the connection
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. No thread may be reading from it or writing to it."""
        self.socket.close()
