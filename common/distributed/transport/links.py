"""Messages between two ranks, over one connection for each direction. Imports no torch.

A connection has one writer and one reader: TLS on which one thread sends while another receives is a data race
(cpython#143756). A message is a header (tag, length) and its bytes. Sending never blocks: what the kernel
does not take at once is left to the link's thread, so that all ranks may send at the same time. Small messages need no
thread.
"""

from __future__ import annotations

import functools
import ssl
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from common.core.errors import summarize_error
from common.distributed.transport.socket_stream import NOTHING, Rest, SocketStream, copy_if_small

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class LinkError(ConnectionError):
    """A connection that was closed, here or by the other rank, or that broke."""


class LinkTimeout(TimeoutError):
    """A rank from or to which nothing moved for the time limit."""


def view_bytes(data: ReadableBuffer) -> memoryview:
    """Return a view of the bytes of contiguous memory."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else NOTHING  # an empty view cannot be cast


class Link:
    """The common part of both directions: the other rank, the counter of bytes, and the end of a link."""

    def __init__(self, stream: SocketStream, peer: int) -> None:
        self.stream, self.peer = stream, peer
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0  # threads that wait for a change
        self._busy = False  # a thread may be in a blocking call on the socket
        self._problem: LinkError | LinkTimeout | None = None

    def close(self) -> None:
        """End the link, and at once, with LinkError, what any thread waits for here."""
        with self._lock:
            self._end(LinkError(f"the connection with rank {self.peer} was closed on this rank"))

    def _end(self, problem: LinkError | LinkTimeout) -> None:
        """Remember why the link ended, if it was alive; wake all. Called under the lock."""
        if self._problem is None:
            self._problem = problem
            self.stream.end_calls()
        if not self._busy:
            self.stream.close()  # otherwise whoever is busy closes it: its number must not be taken by another file
        self._wake()

    def _wake(self) -> None:
        if self._waiting:
            self._changed.notify_all()

    def _wait(self, seconds: float | None = None) -> bool:
        """Wait for a change, under the lock; return False if there is none in time."""
        self._waiting += 1
        try:
            return self._changed.wait(seconds)
        finally:
            self._waiting -= 1

    def _fail(self, error: BaseException) -> BaseException:
        """End the link because of an error of the busy thread; return what to raise."""
        with self._lock:
            self._busy = False
            self._end(self.explain(error))
            return self._copy_problem() if isinstance(error, OSError | EOFError) else error

    def explain(self, error: BaseException) -> LinkError | LinkTimeout:
        """Return an error of the stream as one that names the other rank."""
        if isinstance(error, LinkError):
            return error
        if isinstance(error, BlockingIOError | TimeoutError):
            return LinkTimeout(
                f"rank {self.peer} neither sent nor took anything for {self.stream.timeout:g} s; see its log, or "
                "raise launch.step_timeout"
            )
        if isinstance(error, EOFError | ConnectionError | ssl.SSLEOFError):
            return LinkError(f"rank {self.peer} has closed its connection; see its log")
        if isinstance(error, OSError):
            return LinkError(f"the connection with rank {self.peer} broke: {summarize_error(error)}")
        return LinkError(f"a message of or to rank {self.peer} was broken off: {type(error).__name__}")

    def _copy_problem(self) -> LinkError | LinkTimeout:
        """Return the problem as an exception of its own: several threads may raise it."""
        assert self._problem is not None
        return type(self._problem)(*self._problem.args)


class Outgoing(Link):
    """The direction to another rank."""

    def __init__(self, stream: SocketStream, peer: int) -> None:
        super().__init__(stream, peer)
        self.bytes_sent = 0
        """Bytes of all messages, without headers."""
        self._queue: deque[tuple[int, Rest]] = deque()
        self._newest = self._written = 0  # tickets
        self._thread: threading.Thread | None = None

    def send(self, tag: int, data: ReadableBuffer) -> int:
        """Begin to send contiguous memory; return a ticket. Never blocks. Raises LinkError.

        Memory of more than `socket_stream.SMALL` bytes must stay as it is until `wait(ticket)` returns. Messages arrive
        in order.
        """
        view = view_bytes(data)
        with self._lock:
            if self._problem is not None:
                raise self._copy_problem()
            self._newest += 1
            self.bytes_sent += len(view)
            if self._queue:
                self._queue.append((self._newest, functools.partial(self._send_later, tag, copy_if_small(view))))
                return self._newest
            try:
                rest = self.stream.begin_message(tag, view)
            except (OSError, EOFError) as error:
                self._end(self.explain(error))
                raise self._copy_problem() from None
            if rest is None:
                self._written = self._newest
            else:
                self._queue.append((self._newest, rest))
                self._wake_thread()
            return self._newest

    def _send_later(self, tag: int, view: memoryview) -> None:
        if rest := self.stream.begin_message(tag, view):
            rest()

    def wait(self, ticket: int, seconds: float | None = None) -> None:
        """Wait until a message is with the kernel, with `seconds` so long at most. Raises LinkError, LinkTimeout."""
        if self._written >= ticket:
            return
        end = time.monotonic() + (seconds or 0.0)
        with self._lock:
            while self._written < ticket:
                if self._problem is not None:
                    raise self._copy_problem()
                left = None if seconds is None else max(0.0, end - time.monotonic())  # the thread has the link's limit
                if not self._wait(left) and self._written < ticket:
                    raise LinkTimeout(f"rank {self.peer} did not take the message within {seconds:g} s")

    def _wake_thread(self) -> None:
        self._busy = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_queue, name=f"send to rank {self.peer}", daemon=True)
            self._thread.start()
        else:
            self._wake()

    def _write_queue(self) -> None:
        while True:
            with self._lock:
                while not self._queue and self._problem is None:
                    self._busy = False
                    self._wait()
                if self._problem is not None:
                    self._busy = False
                    self._end(self._problem)
                    return
                ticket, write = self._queue[0]
            try:
                write()
            except BaseException as error:  # noqa: BLE001 (whoever waits raises it)
                self._fail(error)
                return
            with self._lock:
                self._queue.popleft()
                self._written = ticket
                self._wake()
