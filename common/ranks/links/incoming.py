"""Receive messages from another rank. This module does not import torch.

A thread that waits for a message reads from the connection. If the next message is for another thread, the message is
written to the memory that the other thread has provided. If that thread has not provided memory yet, the message is
stored until the thread asks for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from common.ranks.links.outgoing import Link, LinkError, LinkTimeout, view_bytes
from common.ranks.links.socket_stream import PIECE_BYTES, SocketStream

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class ExpectedMessage:
    """A message that has not arrived yet and for which memory is provided in advance."""

    def __init__(self, target: memoryview) -> None:
        self.target = target
        self.has_arrived = False


class IncomingLink(Link):
    """Receiving end of the connection from another rank."""

    def __init__(self, stream: SocketStream, peer: int) -> None:
        super().__init__(stream, peer)
        self._inbox: dict[int, deque[bytearray]] = {}  # messages that arrived before they were expected, by tag
        self._expected: dict[int, deque[ExpectedMessage]] = {}  # expected messages by tag, in order of arrival

    def receive(self, tag: int, into: WriteableBuffer, *, patient: bool = False) -> None:
        """Receive the next message with a given tag into contiguous memory of the same size.

        If `patient` is true, there is no time limit for the start of the message. Raises LinkTimeout, or LinkError if
        the connection fails or the message and the memory differ in size.
        """
        self.wait_for_message(self.expect_message(tag, into), patient=patient)

    def expect_message(self, tag: int, into: WriteableBuffer) -> ExpectedMessage:
        """Provide contiguous memory for the next message with a given tag, without blocking.

        The memory is filled by `wait_for_message`, or earlier by another thread that reads from the connection. Raises
        LinkError if the sizes of the memory and the message differ.
        """
        expected = ExpectedMessage(view_bytes(into))
        with self._lock:
            stored = self._take_stored_message(tag, len(expected.target))
            if stored is None:
                self._expected.setdefault(tag, deque()).append(expected)
            else:
                expected.target[:] = stored
                expected.has_arrived = True
        return expected

    def wait_for_message(
        self, expected: ExpectedMessage, *, patient: bool = False, seconds: float | None = None
    ) -> None:
        """Wait for a message, and read from the connection unless another thread is reading from it.

        If `seconds` is given, never read from the connection, but wait at most `seconds` for another thread to read the
        message. Raises LinkError or LinkTimeout.
        """
        deadline = time.monotonic() + (seconds or 0.0)
        with self._lock:
            while not expected.has_arrived:
                if self._problem is not None:
                    raise self._copy_link_error()
                if seconds is None and not self._busy:
                    self._busy = True
                    break
                limit = self.stream.timeout if seconds is None else max(0.0, deadline - time.monotonic())
                if not self._wait_for_change(limit) and not patient and not expected.has_arrived:
                    if seconds is None:
                        raise self.explain_error(TimeoutError())
                    raise LinkTimeout(f"rank {self.peer} did not send the message within {seconds:g} s")
            else:
                return
        try:
            while not expected.has_arrived:
                self._read_message(*self.stream.read_header(patient))
        except BaseException as error:  # noqa: BLE001 (the position of the next header is unknown)
            raise self._end_after_error(error) from None
        self._stop_reading()

    def receive_pieces(self, tag: int, length: int) -> Iterator[memoryview]:
        """Yield the next message with a given tag in pieces of at most PIECE_BYTES bytes.

        The message must have `length` bytes. Each piece is valid only until the next piece is requested. If the caller
        stops before the last piece, the link is closed. Raises LinkTimeout, or LinkError if the connection fails or the
        message does not have `length` bytes.
        """
        stored = self._take_stored_or_start_reading(tag, length)
        if stored is not None:
            for start in range(0, length, PIECE_BYTES):
                yield memoryview(stored)[start : start + PIECE_BYTES]
            return
        try:
            self._read_until_tag(tag, length)
            yield from self.stream.read_pieces(length)
        except BaseException as error:  # noqa: BLE001 (the position of the next header is unknown)
            raise self._end_after_error(error) from None
        self._stop_reading()

    def _take_stored_message(self, tag: int, length: int) -> bytearray | None:
        """Remove and return the oldest stored message with a given tag. The caller must hold the lock."""
        queue = self._inbox.get(tag)
        if not queue:
            return None
        self._check_length(tag, len(queue[0]), length)
        stored = queue.popleft()
        if not queue:
            del self._inbox[tag]
        return stored

    def _take_stored_or_start_reading(self, tag: int, length: int) -> bytearray | None:
        """Wait for a stored message, or return None as soon as this thread may read from the connection."""
        with self._lock:
            while True:
                stored = self._take_stored_message(tag, length)
                if stored is not None:
                    return stored
                if self._problem is not None:
                    raise self._copy_link_error()
                if not self._busy:
                    self._busy = True
                    return None
                if not self._wait_for_change(self.stream.timeout):
                    raise self.explain_error(TimeoutError())

    def _read_until_tag(self, tag: int, length: int) -> None:
        """Read the header of the next message with a given tag, and all messages before that message."""
        while True:
            next_tag, size = self.stream.read_header()
            if next_tag == tag:
                self._check_length(tag, size, length)
                return
            self._read_message(next_tag, size)

    def _read_message(self, tag: int, size: int) -> None:
        """Read a message into the memory that was provided for it. If no memory was provided, store the message."""
        with self._lock:
            expected = self._take_expected_message(tag)
        stored = bytearray(0 if expected else size)
        if expected:
            self._check_length(tag, size, len(expected.target))
        self.stream.fill_buffer(expected.target if expected else memoryview(stored))
        with self._lock:
            if expected is None and (expected := self._take_expected_message(tag)):  # provided after the read began
                self._check_length(tag, size, len(expected.target))
                expected.target[:] = stored
            if expected is None:
                self._inbox.setdefault(tag, deque()).append(stored)
            else:
                expected.has_arrived = True
            self._wake_waiting_threads()

    def _take_expected_message(self, tag: int) -> ExpectedMessage | None:
        """Remove and return the first expected message with a given tag. The caller must hold the lock."""
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
                f"rank {self.peer} sent {size} bytes instead of {length} (tag {tag}); check that all ranks call the "
                "same collectives with tensors of the same sizes"
            )

    def _stop_reading(self) -> None:
        """Allow another thread to read from the connection."""
        with self._lock:
            self._busy = False
            if self._problem is not None:
                self._end_link(self._problem)
            self._wake_waiting_threads()
