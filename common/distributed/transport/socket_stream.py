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
from typing import TYPE_CHECKING, TypeVar, cast

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

T = TypeVar("T")
NOTHING = memoryview(bytearray())

HEADER = struct.Struct("<QQ")  # tag and bytes of a message
SMALL = 1 << 16  # bytes up to which a message is copied where the kernel does not take it at once
EAGER = 1 << 21  # bytes of it that the caller writes if the kernel takes them: waking a thread may take milliseconds
PIECE = 1 << 18  # bytes of a large message that are handled at once: they stay in a core's cache
Rest = Callable[[], None]


def pack_seconds(seconds: float) -> bytes:
    """Return a time limit as the kernel takes it."""
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))


def copy_if_small(data: memoryview) -> memoryview:
    """Return a copy of at most SMALL bytes, whose memory the caller may change at once; more as they are."""
    return data if len(data) > SMALL else memoryview(bytes(data))


OPEN: weakref.WeakSet[SocketStream] = weakref.WeakSet()


def close_inherited_sockets() -> None:
    """Close the sockets that a forked process has inherited: a connection would outlive its rank."""
    for stream in OPEN:
        stream.close()


os.register_at_fork(after_in_child=close_inherited_sockets)


class TlsSocket(socket.socket):
    """TLS over a connected socket, of which it takes hold. One thread at a time may use it.

    ssl.SSLSocket calls the kernel for each record of 16 kB; here one call carries as many as there are.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, server_side: bool = False) -> None:
        seconds = connection.gettimeout()
        super().__init__(fileno=connection.detach())
        self.settimeout(seconds)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._records = memoryview(bytearray(PIECE))

    def do_handshake(self) -> None:
        """Agree on keys. Raises ssl.SSLError, and BlockingIOError where the socket does not wait: call it again."""
        self._repeat(self._tls.do_handshake)
        self._flush()

    def get_certificate(self) -> bytes | None:
        """Return the certificate of the other side (DER)."""
        return self._tls.getpeercert(binary_form=True)

    def version(self) -> str | None:
        """Return the version of the protocol."""
        return self._tls.version()

    def encrypt(self, data: ReadableBuffer) -> bytes:
        """Return what must be sent to the other side, in the order of the calls, for it to read these bytes."""
        self._tls.write(data)
        return self._outgoing.read()

    def sendall(self, data: ReadableBuffer, flags: int = 0) -> None:
        super().sendall(self.encrypt(data), flags)

    def recv(self, count: int, flags: int = 0) -> bytes:
        try:
            return self._repeat(self._tls.read, count)
        except ssl.SSLEOFError:
            return b""

    def recv_into(self, target: WriteableBuffer, count: int = 0, flags: int = 0) -> int:
        """Return how many bytes were read: with or without MSG_WAITALL at most those of one record."""
        try:
            return cast(int, self._repeat(self._tls.read, count or len(memoryview(target)), target))
        except ssl.SSLEOFError:
            return 0

    def _repeat(self, call: Callable[..., T], *arguments: object) -> T:
        """Call until that needs nothing more from the other side."""
        while True:
            try:
                return call(*arguments)
            except ssl.SSLWantReadError:
                self._flush()
                received = super().recv_into(self._records)
                if received:
                    self._incoming.write(self._records[:received])
                else:
                    self._incoming.write_eof()
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._flush()  # tells the other side why
                raise

    def _flush(self) -> None:
        if self._outgoing.pending:
            super().sendall(self._outgoing.read())


class SocketStream:
    """One end of a connection, plain or TLS, on which messages go in one direction."""

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        self.socket, self.timeout = connection, timeout
        self._scratch = bytearray()
        OPEN.add(self)
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)  # with a limit of Python's own, each call would poll first
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, pack_seconds(timeout))

    # ---- writing

    def begin_message(self, tag: int, data: memoryview) -> Rest | None:
        """Write what needs no waiting; return what writes the rest and may block, None if nothing is left."""
        header = HEADER.pack(tag, len(data))
        if isinstance(self.socket, TlsSocket):
            return self._begin_encrypted(self.socket, header, data)
        now, later = data[:EAGER], data[EAGER:]
        sent = self._write_now(header, now)
        if sent == HEADER.size + len(data):
            return None
        left = header[sent:], copy_if_small(now[max(0, sent - HEADER.size) :]), copy_if_small(later)
        return functools.partial(self._write_rest, *left)

    def _begin_encrypted(self, to: TlsSocket, header: bytes, data: memoryview) -> Rest | None:
        begun, left = to.encrypt(header + data[:SMALL]), data[SMALL:]
        while (sent := self._write_now(begun)) == len(begun) and len(left) > max(0, len(data) - EAGER):
            begun, left = to.encrypt(left[:PIECE]), left[PIECE:]
        begun = begun[sent:]
        return functools.partial(self._write_rest, begun, NOTHING, copy_if_small(left)) if begun or left else None

    def _write_now(self, *parts: ReadableBuffer) -> int:
        """Return how many bytes the kernel took at once."""
        try:
            return self.socket.sendmsg(parts, [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _write_rest(self, begun: bytes, now: memoryview, later: memoryview) -> None:
        """Write what is left of bytes that are encrypted where they must be, and the data after them."""
        socket.socket.sendall(self.socket, begun + now[:SMALL])  # no packet for a header alone
        for data in (now[SMALL:], later):
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
        while len(target):
            count = self.socket.recv_into(target, 0, socket.MSG_WAITALL)
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
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back; no thread may be reading or writing."""
        self.socket.close()
