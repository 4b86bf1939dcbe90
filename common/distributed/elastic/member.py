"""Line of a rank to the coordinator of an elastic run: heartbeats from a thread, sign-in to the next generation.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.distributed.rank_info import ORPHANED

BEATS = 5  # heartbeats in the time after which a rank is lost
GRACE = 2.0  # seconds more that a rank may sleep after its generation is over
SLEEPING = "S"  # as proc(5) has it; not D, which is a wait for a disk
STUCK = "a collective of gloo does not end"
SEND_SECONDS = 1.0  # for the last message of a rank that leaves


class GenerationOver(RuntimeError):
    """A member of this generation is lost: its collectives do not end any more. Or all leave it because one joins."""


@dataclass(frozen=True)
class Generation:
    """The ranks that go on together, until one of them is lost or another one joins."""

    number: int = 1
    members: Sequence[int] = ()
    """Each one's rank at the start of the run, in the order of the ranks of this generation."""
    source: int = 0
    """The rank whose state is the newest."""
    copies: bool = False
    """True where not all ranks have that state."""
    lost: Sequence[int] = ()
    joined: Sequence[int] = ()
    stops: bool = False
    """True where these are too few: they save and stop."""
    done: bool = False
    """True where nothing is left to do, and the members go on without a coordinator."""


class Member:
    """Connection of this rank to the coordinator. A thread sends heartbeats and receives."""

    def __init__(
        self, address: str, number: int, timeout: float, key: str, *, joins: bool, irreplaceable: bool = False
    ) -> None:
        """`number` is this rank's at the start of the run, `timeout` that after which it counts as lost.

        Without an `irreplaceable` rank the run ends.
        """
        self.orphaned: list[str] = json.loads(os.environ.get(ORPHANED, "[]"))
        """Command that this process executes instead once it cannot reach the coordinator."""
        self.socket, self.pause = connect_to_coordinator(address, timeout), timeout / BEATS
        self.generation = Generation(0 if joins else 1)
        self.on_end: Callable[[], None] = lambda: None
        """Called in the thread when the generation is over, and again until `sign_in`, to wake the main thread."""
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        os.register_at_fork(after_in_child=self.socket.close)  # it would last as long as a data worker
        self.sending, self.closed, self.over, self.signed = threading.Lock(), False, joins, False
        self.join_waits = False
        """True where a rank waits to belong to the next generation."""
        self.patience = timeout + GRACE
        """Seconds that the main thread may sleep once the generation is over."""
        self.wait_ends = False
        """True while the main thread is in a wait with a time limit of its own."""
        self.busy, self.used = 0.0, -1
        """When the main thread was last seen busy since the generation is over, and its processor time then."""
        hello = {"hello": number, "key": key, "joins": joins, "irreplaceable": irreplaceable, "pid": os.getpid()}
        self._send(hello)
        threading.Thread(target=self._listen, daemon=True, name="elastic").start()

    def sign_in(self, progress: Sequence[int], *, done: bool = False, together: bool = False) -> Generation:
        """Ask for the next generation and wait until it is formed. `progress` orders states, the newest is highest.

        Without `done` and `together`, which all members say after the same step, it ends the generation of the others.
        """
        self.signed = True
        self._send({"sign_in": {"progress": list(progress), "done": done, "together": together}})
        while "generation" not in self.answers.get():
            pass  # of the generation before
        return self.generation

    @contextlib.contextmanager
    def in_bounded_wait(self) -> Iterator[None]:
        """Mark a wait of the main thread that has a time limit: during it, this rank is not stuck."""
        self.wait_ends = True
        try:
            yield
        finally:
            self.busy = time.monotonic()
            self.wait_ends = False

    def set(self, key: str, value: str) -> None:
        """Set a value for all members of this generation."""
        self._send({"set": key, "value": value})

    def get(self, keys: Sequence[str]) -> list[str]:
        """Wait for values that members of this generation set. Raises GenerationOver."""
        self._send({"get": list(keys)})
        answer = self.answers.get()
        if "values" not in answer:
            raise GenerationOver("a rank was lost while the ranks connected")
        return list(answer["values"])

    def close(self) -> None:
        """Leave orderly: nobody waits for this rank any more. The connection ends with the process."""
        self.closed = True
        with contextlib.suppress(OSError):
            self._send({"bye": True})

    def _send(self, message: dict[str, Any]) -> None:
        with self.sending:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self) -> None:
        received, next_beat = b"", 0.0
        poller = select.poll()  # select() takes no descriptor above 1023
        poller.register(self.socket, select.POLLIN)
        try:
            while True:
                now = time.monotonic()
                if now >= next_beat:
                    next_beat = now + self.pause
                    self._send({"beat": True})
                    if self.over and not self.signed:  # it may be in a collective that began meanwhile
                        self.on_end()
                        self._leave_if_stuck(now)
                if not poller.poll(1000 * max(0.0, next_beat - now)):
                    continue
                part = self.socket.recv(1 << 16)
                if not part:
                    break
                *complete, received = (received + part).split(b"\n")
                for text in complete:
                    self._receive(json.loads(text))
        except (OSError, ValueError):
            pass
        if not self.closed:
            self._leave("the coordinator has given up this rank, or has ended, or cannot be reached", self.orphaned)

    def _receive(self, message: dict[str, Any]) -> None:
        if "leave" in message:
            self._leave(message["leave"])
        if "over" in message:
            self.over, self.used = True, -1
            self.on_end()
        elif "join" in message:
            self.join_waits = True
            return
        elif "generation" in message:
            self.generation = Generation(**({"number": 0} | message["generation"]))
            self.over = self.signed = self.join_waits = False
        self.answers.put(message)

    def _leave_if_stuck(self, now: float) -> None:
        """Leave where the main thread does not come to sign in, and sleeps: a collective of gloo may never end.

        A connection on which a message has begun for a collective that has failed is not read again, not to its end
        either, and another collective that waits for it cannot be woken. As a lost rank this one can come back.
        """
        state, used = read_main_thread()
        if self.wait_ends or state != SLEEPING or used != self.used:
            self.busy, self.used = now, used
        elif now - self.busy > self.patience:
            self.leave_as_lost(STUCK)

    def leave_as_lost(self, why: str) -> None:
        """End this process as a lost rank, which can be started again; the launcher reports the reason."""
        self._leave(f"{why}; it counts as lost", lost=True)

    def _announce_loss(self, why: str) -> None:
        """Send the coordinator the reason why this process ends itself, unless another thread blocks the connection."""
        if not self.sending.acquire(timeout=SEND_SECONDS):
            return
        try:
            with contextlib.suppress(OSError):
                self.socket.sendall(json.dumps({"lost": f"ended itself: {why}"}).encode() + b"\n")
        finally:
            self.sending.release()

    def _leave(self, why: str, command: Sequence[str] = (), *, lost: bool = False) -> None:
        """End this process at once, or execute a command in its place: it must not write any more."""
        print(f"this rank leaves the run: {why}", file=sys.stderr, flush=True)
        try:
            if command:
                os.execvp(command[0], [*command])
            if lost:
                self._announce_loss(why)
                faulthandler.dump_traceback(sys.stderr)
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(0)


def read_main_thread() -> tuple[str, int]:
    """Read the state of this process's main thread, a letter as in proc(5), and its processor time in ticks."""
    fields = Path(f"/proc/self/task/{os.getpid()}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[11]) + int(fields[12])


def connect_to_coordinator(address: str, timeout: float) -> socket.socket:
    """Connect to a coordinator: the path of a UNIX socket, or host:port. Raises OSError.

    A TCP connection fails where its other host has acknowledged nothing for so many seconds.
    """
    if address.startswith("/"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        return connection
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * timeout))
    send_at_once(connection)
    return connection


def send_at_once(connection: socket.socket) -> None:
    """Let a TCP connection send each message at once, however short."""
    if connection.family == socket.AF_INET:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
