"""Handles (`torch.distributed.Work`) of point-to-point sends and receives."""

from __future__ import annotations

import datetime
import threading
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

from common.backend.communicator import PendingSend, TensorBytes
from common.backend.worker import NO_TIMEOUT
from common.ranks.links.incoming import ExpectedMessage, IncomingLink
from common.ranks.links.outgoing import LINK_ERRORS

GRACE_SECONDS = 1e-3  # delay that gives the calling thread time to start reading an expected message itself
ExplainError = Callable[[str, BaseException], BaseException]


class MessageWork(dist.Work):
    """Handle of a message to or from another rank.

    `explain` converts link errors to the exceptions that torch's own backends raise.
    """

    def __init__(self, explain: ExplainError) -> None:
        super().__init__()
        self.explain = explain

    def get_future(self) -> torch.futures.Future[object]:
        """Raise NotImplementedError, because no thread would run the callbacks."""
        raise NotImplementedError("builtin does not support futures for messages; call wait() instead")


class SendWork(MessageWork):
    """Handle of a message that is being sent."""

    def __init__(self, pending: PendingSend, explain: ExplainError) -> None:
        super().__init__(explain)
        self.pending = pending

    def wait(self, timeout: datetime.timedelta = NO_TIMEOUT) -> bool:
        """Wait until the tensor may be modified.

        Without `timeout`, the time limit of the process group applies.
        """
        try:
            self.pending.wait(timeout.total_seconds() or None)
        except LINK_ERRORS as error:
            raise self.explain("send", error) from error
        return True


class ReceiveWork(MessageWork):
    """Handle of an expected message."""

    def __init__(
        self, link: IncomingLink, block: TensorBytes, expected: ExpectedMessage, explain: ExplainError
    ) -> None:
        super().__init__(explain)
        self.link = link
        self.block = block
        self.expected = expected

    def wait(self, timeout: datetime.timedelta = NO_TIMEOUT) -> bool:
        """Wait until the tensor contains the message.

        Without `timeout`, the time limit of the process group applies.
        """
        try:
            self.link.wait_for_message(self.expected, seconds=timeout.total_seconds() or None)
        except LINK_ERRORS as error:
            raise self.explain("recv", error) from error
        self.block.write_back()
        return True


class BackgroundReader:
    """Thread that reads expected messages from a rank while no other thread waits for these messages."""

    def __init__(self, link: IncomingLink) -> None:
        self.link = link
        self.changed = threading.Condition()
        self.expected: deque[ExpectedMessage] = deque()
        self.thread: threading.Thread | None = None
        self.closed = False

    def read_in_background(self, expected: ExpectedMessage) -> None:
        """Let the background thread read from the connection until an expected message has arrived."""
        if expected.has_arrived:
            return
        with self.changed:
            self.expected.append(expected)
            if self.thread is None:
                name = f"receive from rank {self.link.peer}"
                self.thread = threading.Thread(target=self._read_messages, name=name, daemon=True)
                self.thread.start()
            else:
                self.changed.notify()

    def close(self) -> None:
        """End the background thread. Threads that wait for messages receive an error from the link."""
        with self.changed:
            self.closed = True
            self.changed.notify()

    def _read_messages(self) -> None:
        while (expected := self._wait_for_oldest_message()) is not None:
            try:
                self.link.wait_for_message(expected, patient=True)
            except LINK_ERRORS:
                return

    def _wait_for_oldest_message(self) -> ExpectedMessage | None:
        """Wait until a message is expected, and return the oldest expected message. Return None after `close`."""
        with self.changed:
            while not self.closed:
                while self.expected and self.expected[0].has_arrived:
                    self.expected.popleft()
                if self.expected:
                    return self.expected[0]
                self.changed.wait()
                self.changed.wait(GRACE_SECONDS)
        return None
