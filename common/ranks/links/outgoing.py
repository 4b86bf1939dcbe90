"""Messages between two ranks over one connection per direction. This module does not import torch.

Each connection has one writer and one reader, because sending in one thread and receiving in another over the same TLS
connection is a data race (python/cpython#143756). A message consists of a header (tag and length) and its data.
Sending never blocks, so all ranks may send at the same time. If the kernel does not accept all data immediately, a
background thread of the link writes the remaining data. Small messages usually need no thread.
"""

from __future__ import annotations

import functools
import ssl
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from common.ranks.links.socket_stream import EMPTY_VIEW, FinishWrite, SocketStream, copy_if_small
from common.system.causes import Cause
from common.system.errors import CausedError, RankTimeoutError, summarize_error

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class LinkError(CausedError, ConnectionError):
    """Raised if the connection between two ranks fails or if either rank closes it."""

    cause = Cause.LOST_PEER


class LinkTimeout(RankTimeoutError):
    """Raised if a rank makes no progress within the time limit."""


LINK_ERRORS = (LinkError, LinkTimeout)


def view_bytes(data: ReadableBuffer) -> memoryview:
    """Return contiguous memory as a view of bytes."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else EMPTY_VIEW  # an empty view cannot be cast


class Link:
    """Base class of incoming and outgoing links. It stores the peer's rank and the error that ended the link."""

    def __init__(self, stream: SocketStream, peer: int) -> None:
        self.stream = stream
        self.peer = peer
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting_threads = 0
        self._busy = False  # whether a thread may be in a blocking call on the socket
        self._problem: LinkError | LinkTimeout | None = None

    def close(self) -> None:
        """Close the link. Threads that are waiting for the link raise LinkError immediately."""
        with self._lock:
            self._end_link(LinkError(f"the connection with rank {self.peer} was closed by this rank"))

    def _end_link(self, problem: LinkError | LinkTimeout) -> None:
        """End the link and wake all waiting threads. The caller must hold the lock."""
        if self._problem is None:
            self._problem = problem
            self.stream.interrupt_calls()
        if not self._busy:
            self.stream.close()  # otherwise, the busy thread closes it, so that its descriptor is not reused early
        self._wake_waiting_threads()

    def _wake_waiting_threads(self) -> None:
        if self._waiting_threads:
            self._changed.notify_all()

    def _wait_for_change(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds` for the state of the link to change, and return whether it changed.

        The caller must hold the lock.
        """
        self._waiting_threads += 1
        try:
            return self._changed.wait(seconds)
        finally:
            self._waiting_threads -= 1

    def _end_after_error(self, error: BaseException) -> BaseException:
        """End the link after an error in the busy thread and return the exception to raise."""
        with self._lock:
            self._busy = False
            self._end_link(self.explain_error(error))
            return self._copy_link_error() if isinstance(error, OSError | EOFError) else error

    def explain_error(self, error: BaseException) -> LinkError | LinkTimeout:
        """Convert an error of the stream to an exception that names the peer."""
        if isinstance(error, LinkError):
            return error
        if isinstance(error, BlockingIOError | TimeoutError):
            return LinkTimeout(
                f"rank {self.peer} does not answer (no progress for {self.stream.timeout:g} s); see its log, or raise "
                "launch.step_timeout"
            )
        if isinstance(error, EOFError | ConnectionError | ssl.SSLEOFError):
            return LinkError(f"rank {self.peer} has closed its connection; see its log")
        if isinstance(error, OSError):
            return LinkError(f"the connection with rank {self.peer} failed: {summarize_error(error)}")
        return LinkError(f"a message to or from rank {self.peer} was interrupted: {type(error).__name__}")

    def _copy_link_error(self) -> LinkError | LinkTimeout:
        """Return a copy of the error that ended the link, because several threads may raise it."""
        assert self._problem is not None
        return type(self._problem)(*self._problem.args)


class OutgoingLink(Link):
    """Sending end of the connection to another rank."""

    def __init__(self, stream: SocketStream, peer: int) -> None:
        super().__init__(stream, peer)
        self.bytes_sent = 0
        """Total size of all sent messages in bytes, not counting headers."""
        self._queue: deque[tuple[int, FinishWrite]] = deque()
        self._newest_ticket = 0
        self._written_ticket = 0
        self._thread: threading.Thread | None = None

    def send(self, tag: int, data: ReadableBuffer) -> int:
        """Start sending contiguous memory without blocking and return a ticket for `wait_until_written`.

        Memory of more than `socket_stream.SMALL_BYTES` bytes must not change until `wait_until_written` returns for
        this ticket. Messages arrive in the order in which they were sent. Raises LinkError.
        """
        view = view_bytes(data)
        with self._lock:
            if self._problem is not None:
                raise self._copy_link_error()
            self._newest_ticket += 1
            self.bytes_sent += len(view)
            if self._queue:
                write = functools.partial(self._write_message, tag, copy_if_small(view))
                self._queue.append((self._newest_ticket, write))
                return self._newest_ticket
            try:
                finish_write = self.stream.begin_message(tag, view)
            except (OSError, EOFError) as error:
                self._end_link(self.explain_error(error))
                raise self._copy_link_error() from None
            if finish_write is None:
                self._written_ticket = self._newest_ticket
            else:
                self._queue.append((self._newest_ticket, finish_write))
                self._wake_writer()
            return self._newest_ticket

    def _write_message(self, tag: int, view: memoryview) -> None:
        if finish_write := self.stream.begin_message(tag, view):
            finish_write()

    def wait_until_written(self, ticket: int, seconds: float | None = None) -> None:
        """Wait until the kernel has accepted a message, for at most `seconds`.

        Without `seconds`, the time limit of the link applies. Raises LinkError or LinkTimeout.
        """
        if self._written_ticket >= ticket:
            return
        deadline = time.monotonic() + (seconds or 0.0)
        with self._lock:
            while self._written_ticket < ticket:
                if self._problem is not None:
                    raise self._copy_link_error()
                # without `seconds`, the time limit of the link's thread applies
                remaining = None if seconds is None else max(0.0, deadline - time.monotonic())
                if not self._wait_for_change(remaining) and self._written_ticket < ticket:
                    raise LinkTimeout(f"rank {self.peer} did not accept the message within {seconds:g} s")

    def _wake_writer(self) -> None:
        self._busy = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_queue, name=f"send to rank {self.peer}", daemon=True)
            self._thread.start()
        else:
            self._wake_waiting_threads()

    def _write_queue(self) -> None:
        while True:
            with self._lock:
                while not self._queue and self._problem is None:
                    self._busy = False
                    self._wait_for_change()
                if self._problem is not None:
                    self._busy = False
                    self._end_link(self._problem)
                    return
                ticket, write = self._queue[0]
            try:
                write()
            except BaseException as error:  # noqa: BLE001 (the waiting thread raises the error)
                self._end_after_error(error)
                return
            with self._lock:
                self._queue.popleft()
                self._written_ticket = ticket
                self._wake_waiting_threads()
