"""The direction of messages that come from another rank. Imports no torch.

Whoever waits for a message reads the connection. What it reads for others goes to where they expect it, or is kept
until they do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from common.distributed.transport.links import Link, LinkError, LinkTimeout, view_bytes
from common.distributed.transport.socket_stream import PIECE, SocketStream

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class Expected:
    """A message for which there is memory before it comes."""

    def __init__(self, target: memoryview) -> None:
        self.target, self.is_here = target, False


class Incoming(Link):
    """The direction from another rank."""

    def __init__(self, stream: SocketStream, peer: int) -> None:
        super().__init__(stream, peer)
        self.bytes_received = 0
        """Bytes of all messages, without headers."""
        self._inbox: dict[int, deque[bytearray]] = {}  # messages that nobody expected when they came, by tag
        self._expected: dict[int, deque[Expected]] = {}  # in the order in which they come

    def receive(self, tag: int, into: WriteableBuffer, *, patient: bool = False) -> None:
        """Wait for the next message with a tag and write it to contiguous memory of its size.

        `patient` is for a message that nobody waits for yet: it may begin after any time. Raises LinkError, also where
        the sizes differ, and LinkTimeout.
        """
        self.wait_for(self.expect(tag, into), patient=patient)

    def expect(self, tag: int, into: WriteableBuffer) -> Expected:
        """Give contiguous memory for the next message with a tag, to be filled when it comes. Never blocks.

        Somebody must read the connection meanwhile, or `wait_for` the message. Raises LinkError where the sizes differ.
        """
        expected = Expected(view_bytes(into))
        with self._lock:
            stored = self._take_stored(tag, len(expected.target))
            if stored is None:
                self._expected.setdefault(tag, deque()).append(expected)
            else:
                expected.target[:] = stored
                expected.is_here = True
        return expected

    def wait_for(self, expected: Expected, *, patient: bool = False, seconds: float | None = None) -> None:
        """Wait for a message, reading the connection if nobody else does.

        With `seconds` it does not read, but waits at most so long for another thread to do it.
        Raises LinkError, LinkTimeout.
        """
        end = time.monotonic() + (seconds or 0.0)
        with self._lock:
            while not expected.is_here:
                if self._problem is not None:
                    raise self._copy_problem()
                if seconds is None and not self._busy:
                    self._busy = True
                    break
                limit = self.stream.timeout if seconds is None else max(0.0, end - time.monotonic())
                if not self._wait(limit) and not patient and not expected.is_here:
                    if seconds is None:
                        raise self.explain(TimeoutError())
                    raise LinkTimeout(f"rank {self.peer} did not send the message within {seconds:g} s")
            else:
                return
        try:
            while not expected.is_here:
                self._read_message(*self.stream.read_header(patient))
        except BaseException as error:  # noqa: BLE001 (the next header could no longer be found)
            raise self._fail(error) from None
        self._release()

    def receive_pieces(self, tag: int, length: int) -> Iterator[memoryview]:
        """Yield the next message with a tag, of `length` bytes, in pieces of PIECE bytes and a last one.

        Each is valid until the next one. A message that is not read to its end ends the link.
        Raises LinkError, also where the sizes differ, and LinkTimeout.
        """
        stored = self._claim(tag, length)
        if stored is not None:
            for begin in range(0, length, PIECE):
                yield memoryview(stored)[begin : begin + PIECE]
            return
        try:
            self._find(tag, length)
            yield from self.stream.read_pieces(length)
        except BaseException as error:  # noqa: BLE001 (the next header could no longer be found)
            raise self._fail(error) from None
        self._release(length)

    def _take_stored(self, tag: int, length: int) -> bytearray | None:
        """Return the oldest message of a tag that came before it was expected. Called under the lock."""
        queue = self._inbox.get(tag)
        if not queue:
            return None
        self._check_length(tag, len(queue[0]), length)
        stored = queue.popleft()
        if not queue:
            del self._inbox[tag]
        return stored

    def _claim(self, tag: int, length: int) -> bytearray | None:
        """Return a message that is there; None if this thread is to read the connection."""
        with self._lock:
            while True:
                stored = self._take_stored(tag, length)
                if stored is not None:
                    return stored
                if self._problem is not None:
                    raise self._copy_problem()
                if not self._busy:
                    self._busy = True
                    return None
                if not self._wait(self.stream.timeout):
                    raise self.explain(TimeoutError())

    def _find(self, tag: int, length: int) -> None:
        """Read until the message with a tag begins; keep those before it."""
        while True:
            found, size = self.stream.read_header()
            if found == tag:
                self._check_length(tag, size, length)
                return
            self._read_message(found, size)

    def _read_message(self, tag: int, size: int) -> None:
        """Read a message to where it is expected, or store it."""
        with self._lock:
            expected = self._take_expected(tag)
        stored = bytearray(0 if expected else size)
        if expected:
            self._check_length(tag, size, len(expected.target))
        self.stream.read_into(expected.target if expected else memoryview(stored))
        with self._lock:
            if expected is None and (expected := self._take_expected(tag)):  # since the message began
                self._check_length(tag, size, len(expected.target))
                expected.target[:] = stored
            if expected is None:
                self._inbox.setdefault(tag, deque()).append(stored)
            else:
                expected.is_here = True
            self.bytes_received += size
            self._wake()

    def _take_expected(self, tag: int) -> Expected | None:
        """Return what is expected first with a tag. Called under the lock."""
        queue = self._expected.get(tag)
        if not queue:
            return None
        expected = queue.popleft()
        if not queue:
            del self._expected[tag]
        return expected

    def _check_length(self, tag: int, size: int, length: int) -> None:
        if size != length:
            raise LinkError(
                f"rank {self.peer} sent {size} bytes where {length} were expected (tag {tag}): the ranks call "
                "different collectives, or with tensors of different sizes"
            )

    def _release(self, length: int = 0) -> None:
        with self._lock:
            self.bytes_received += length
            self._busy = False
            if self._problem is not None:
                self._end(self._problem)
            self._wake()
