"""Messages between two ranks over one connection per direction. Imports no torch.

Each connection has one writer and one reader: with TLS, sending in one thread while receiving in another is a data race
(cpython#143756). A message is a header (tag, length) and its bytes. Sending never blocks: the link's thread writes what
the kernel does not accept at once, so all ranks may send at the same time. Small messages need no thread.
"""

from __future__ import annotations

import functools
import ssl
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from common.core.errors import summarize_error
from common.distributed.transport.socket_stream import EMPTY_VIEW, FinishWrite, SocketStream, copy_if_small

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class LinkError(ConnectionError):
    """The connection broke, or one of its ranks closed it."""


class LinkTimeout(TimeoutError):
    """A rank made no progress within the time limit."""


LINK_ERRORS = (LinkError, LinkTimeout)


def view_bytes(data: ReadableBuffer) -> memoryview:
    """Return a view of the bytes of contiguous memory."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else EMPTY_VIEW  # an empty view cannot be cast


class Link:
    """Base class of both directions: the peer's rank, and the link's failure or closing."""

    def __init__(self, stream: SocketStream, peer: int) -> None:
        self.stream = stream
        self.peer = peer
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting_threads = 0
        self._busy = False  # whether a thread may be in a blocking call on the socket
        self._problem: LinkError | LinkTimeout | None = None

    def close(self) -> None:
        """Close the link; threads that wait for it raise LinkError at once."""
        with self._lock:
            self._end_link(LinkError(f"the connection with rank {self.peer} was closed on this rank"))

    def _end_link(self, problem: LinkError | LinkTimeout) -> None:
        """End the link and wake all threads. The caller holds the lock."""
        if self._problem is None:
            self._problem = problem
            self.stream.interrupt_calls()
        if not self._busy:
            self.stream.close()  # else the busy thread closes it: the descriptor must not be reused before
        self._wake_waiting_threads()

    def _wake_waiting_threads(self) -> None:
        if self._waiting_threads:
            self._changed.notify_all()

    def _wait_for_change(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds` for a change; return whether there was one.

        The caller holds the lock.
        """
        self._waiting_threads += 1
        try:
            return self._changed.wait(seconds)
        finally:
            self._waiting_threads -= 1

    def _end_after_error(self, error: BaseException) -> BaseException:
        """End the link after an error of the busy thread; return the exception to raise."""
        with self._lock:
            self._busy = False
            self._end_link(self.explain_error(error))
            return self._copy_problem() if isinstance(error, OSError | EOFError) else error

    def explain_error(self, error: BaseException) -> LinkError | LinkTimeout:
        """Return an exception that names the peer for an error of the stream."""
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
            return LinkError(f"the connection with rank {self.peer} broke: {summarize_error(error)}")
        return LinkError(f"a message to or from rank {self.peer} was interrupted: {type(error).__name__}")

    def _copy_problem(self) -> LinkError | LinkTimeout:
        """Return a copy of the problem, because several threads may raise it."""
        assert self._problem is not None
        return type(self._problem)(*self._problem.args)


class Outgoing(Link):
    """The direction to another rank."""

    def __init__(self, stream: SocketStream, peer: int) -> None:
        super().__init__(stream, peer)
        self.bytes_sent = 0
        """Bytes of all messages, without headers."""
        self._queue: deque[tuple[int, FinishWrite]] = deque()
        self._newest_ticket = 0
        self._written_ticket = 0
        self._thread: threading.Thread | None = None

    def send(self, tag: int, data: ReadableBuffer) -> int:
        """Start sending contiguous memory without blocking; return a ticket. Raises LinkError.

        Memory of more than `socket_stream.SMALL_BYTES` bytes must not change until `wait(ticket)` returns. Messages
        arrive in the order in which they were sent.
        """
        view = view_bytes(data)
        with self._lock:
            if self._problem is not None:
                raise self._copy_problem()
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
                raise self._copy_problem() from None
            if finish_write is None:
                self._written_ticket = self._newest_ticket
            else:
                self._queue.append((self._newest_ticket, finish_write))
                self._wake_writer()
            return self._newest_ticket

    def _write_message(self, tag: int, view: memoryview) -> None:
        if finish_write := self.stream.begin_message(tag, view):
            finish_write()

    def wait(self, ticket: int, seconds: float | None = None) -> None:
        """Wait, for at most `seconds`, until the kernel has accepted a message. Raises LinkError, LinkTimeout."""
        if self._written_ticket >= ticket:
            return
        deadline = time.monotonic() + (seconds or 0.0)
        with self._lock:
            while self._written_ticket < ticket:
                if self._problem is not None:
                    raise self._copy_problem()
                # without `seconds` the limit of the link's thread applies
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
            except BaseException as error:  # noqa: BLE001 (the thread that waits raises it)
                self._end_after_error(error)
                return
            with self._lock:
                self._queue.popleft()
                self._written_ticket = ticket
                self._wake_waiting_threads()
