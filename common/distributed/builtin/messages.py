"""Point-to-point messages as torch knows them: works that somebody may wait for."""

from __future__ import annotations

import datetime
import threading
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

from common.distributed.builtin.communicator import Block, Flying
from common.distributed.builtin.worker import FOREVER
from common.distributed.transport.incoming import Expected, Incoming
from common.distributed.transport.links import LinkError, LinkTimeout

PAUSE = 1e-3  # seconds in which whoever expects a message may begin to wait for it
Explain = Callable[[str, BaseException], BaseException]


class Message(dist.Work):
    """Message to or from another rank. `explain` makes errors of links those of torch."""

    def __init__(self, explain: Explain) -> None:
        super().__init__()
        self.explain = explain

    def get_future(self) -> torch.futures.Future[object]:
        """Raise: whoever reads a message has no thread for callbacks."""
        raise NotImplementedError("builtin has no futures of messages; call wait()")


class Sent(Message):
    """Message on its way out."""

    def __init__(self, flying: Flying, explain: Explain) -> None:
        super().__init__(explain)
        self.flying = flying

    def wait(self, timeout: datetime.timedelta = FOREVER) -> bool:
        """Wait until the tensor may change, for `timeout` or else for the time limit of the group."""
        try:
            self.flying.wait(timeout.total_seconds() or None)
        except (LinkError, LinkTimeout) as error:
            raise self.explain("send", error) from error
        return True


class Arriving(Message):
    """Message that is expected."""

    def __init__(self, link: Incoming, block: Block, expected: Expected, explain: Explain) -> None:
        super().__init__(explain)
        self.link, self.block, self.expected = link, block, expected

    def wait(self, timeout: datetime.timedelta = FOREVER) -> bool:
        """Wait until the tensor holds the message, for `timeout` or else for the time limit of the group."""
        try:
            self.link.wait_for(self.expected, seconds=timeout.total_seconds() or None)
        except (LinkError, LinkTimeout) as error:
            raise self.explain("recv", error) from error
        self.block.store()
        return True


class Attendant:
    """Thread that reads the messages of a rank which are expected while nobody waits for them."""

    def __init__(self, link: Incoming) -> None:
        self.link = link
        self.changed = threading.Condition()
        self.expected: deque[Expected] = deque()
        self.thread: threading.Thread | None = None
        self.closed = False

    def read_in_background(self, expected: Expected) -> None:
        """Let the thread read the connection until a message is here."""
        if expected.is_here:
            return
        with self.changed:
            self.expected.append(expected)
            if self.thread is None:
                name = f"receive from rank {self.link.peer}"
                self.thread = threading.Thread(target=self._attend, name=name, daemon=True)
                self.thread.start()
            else:
                self.changed.notify()

    def close(self) -> None:
        """End the thread; whoever waits learns the reason from the link."""
        with self.changed:
            self.closed = True
            self.changed.notify()

    def _attend(self) -> None:
        while (first := self._find_first()) is not None:
            try:
                self.link.wait_for(first, patient=True)
            except (LinkError, LinkTimeout):
                return

    def _find_first(self) -> Expected | None:
        """Wait for the oldest message that is expected; None at the end."""
        with self.changed:
            while not self.closed:
                while self.expected and self.expected[0].is_here:
                    self.expected.popleft()
                if self.expected:
                    return self.expected[0]
                self.changed.wait()
                self.changed.wait(PAUSE)
        return None
