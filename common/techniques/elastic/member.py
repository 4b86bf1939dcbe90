"""Connection of a rank to the coordinator of an elastic run, for heartbeats and for joining generations.

This module does not import torch.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.ranks.rank_info import ORPHAN_COMMAND_VARIABLE
from common.system import bounded_wait

HEARTBEATS_PER_TIMEOUT = 5
GRACE_SECONDS = 2.0  # time in addition to the timeout before a rank that has not signed in counts as stuck
SLEEPING_STATE = "S"  # process state in proc(5); state D, in which a process waits for a disk, does not count as sleep
STUCK_REASON = "a gloo collective does not end"
SEND_SECONDS = 1.0  # time limit for sending the last message of a rank that leaves


class GenerationEnded(RuntimeError):
    """Raised when the current generation has ended.

    A generation ends when a member is lost, because collectives of the generation can then never finish. A generation
    also ends when all members leave to let another rank join.
    """


@dataclass(frozen=True)
class Generation:
    """Set of ranks that train together until one of them is lost or another rank joins."""

    number: int = 1
    members: Sequence[int] = ()
    """Original rank of each member, in the order of the members' ranks in this generation."""
    source: int = 0
    """Rank in this generation that has the newest state."""
    copies: bool = False
    """True if some ranks do not have the newest state and must copy it."""
    lost: Sequence[int] = ()
    joined: Sequence[int] = ()
    stops: bool = False
    """True if the ranks must save a checkpoint and stop, because there are fewer ranks than `elastic.min`."""
    done: bool = False
    """True if the run has finished, so that the members no longer need the coordinator."""


class Member:
    """Connection of this rank to the coordinator, with a thread that sends heartbeats and receives messages."""

    def __init__(
        self, address: str, number: int, timeout: float, key: str, *, joins: bool, irreplaceable: bool = False
    ) -> None:
        """Connect to the coordinator and start the thread.

        `number` is the original rank. A rank is declared lost after `timeout` seconds without a heartbeat. The run ends
        if an `irreplaceable` rank is lost.
        """
        self.orphan_command: list[str] = json.loads(os.environ.get(ORPHAN_COMMAND_VARIABLE, "[]"))
        """Command that replaces this process if it can no longer reach the coordinator."""
        self.socket = connect_to_coordinator(address, timeout)
        self.heartbeat_seconds = timeout / HEARTBEATS_PER_TIMEOUT
        self.generation = Generation(0 if joins else 1)
        self.on_generation_end: Callable[[], None] = lambda: None
        """Function that the thread calls repeatedly to wake up the main thread, from the end of a generation until the
        main thread calls `sign_in`."""
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        os.register_at_fork(after_in_child=self.socket.close)  # otherwise, data workers would keep the socket open
        self.send_lock = threading.Lock()
        self.closed = False
        self.generation_ended = joins
        """True from the end of a generation until the next one is formed."""
        self.has_signed_in = False
        self.has_waiting_rank = False
        """True if another rank is waiting to join the next generation."""
        self.max_sleep_seconds = timeout + GRACE_SECONDS
        """Time in seconds that the main thread may sleep after the end of a generation before it counts as stuck."""
        self.last_busy = 0.0
        """Monotonic time at which the main thread was last seen busy after the end of the generation."""
        self.cpu_ticks = -1
        """CPU time of the main thread at `last_busy`, in clock ticks."""
        self._send({"hello": number, "key": key, "joins": joins, "irreplaceable": irreplaceable, "pid": os.getpid()})
        threading.Thread(target=self._listen, daemon=True, name="elastic").start()

    def sign_in(self, progress: Sequence[int], *, done: bool = False, together: bool = False) -> Generation:
        """Request to join the next generation, wait until it is formed, and return it.

        The rank with the greatest `progress` has the newest training state. The request ends the current generation of
        the other ranks, unless `done` or `together` is true. All members must make a request with `done` or `together`
        after the same step.
        """
        self.has_signed_in = True
        self._send({"sign_in": {"progress": list(progress), "done": done, "together": together}})
        while "generation" not in self.answers.get():
            pass  # discards an answer that belongs to the previous generation
        return self.generation

    def set_value(self, key: str, value: str) -> None:
        """Set a value for all members of this generation."""
        self._send({"set": key, "value": value})

    def get_values(self, keys: Sequence[str]) -> list[str]:
        """Wait until members of this generation have set the values of all `keys`, and return these values.

        Raises GenerationEnded if the generation ends first.
        """
        self._send({"get": list(keys)})
        answer = self.answers.get()
        if "values" not in answer:
            raise GenerationEnded("a rank was lost while the ranks were connecting")
        return list(answer["values"])

    def close(self) -> None:
        """Leave the generation in an orderly way, so that the other ranks no longer wait for this rank.

        The connection remains open until the process ends.
        """
        self.closed = True
        with contextlib.suppress(OSError):
            self._send({"bye": True})

    def _send(self, message: dict[str, Any]) -> None:
        with self.send_lock:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self) -> None:
        received = b""
        next_heartbeat = 0.0
        poller = select.poll()  # select() does not support descriptors above 1023
        poller.register(self.socket, select.POLLIN)
        try:
            while True:
                now = time.monotonic()
                if now >= next_heartbeat:
                    next_heartbeat = now + self.heartbeat_seconds
                    self._send({"beat": True})
                    if self.generation_ended and not self.has_signed_in:  # another collective may have started by now
                        self.on_generation_end()
                        self._leave_if_stuck(now)
                if not poller.poll(1000 * max(0.0, next_heartbeat - now)):
                    continue
                part = self.socket.recv(1 << 16)
                if not part:
                    break
                *lines, received = (received + part).split(b"\n")
                for line in lines:
                    self._handle_message(json.loads(line))
        except (OSError, ValueError):
            pass
        if not self.closed:
            self._end_process(
                "the coordinator has declared this rank lost, has ended, or cannot be reached", self.orphan_command
            )

    def _handle_message(self, message: dict[str, Any]) -> None:
        if "leave" in message:
            self._end_process(message["leave"])
        if "over" in message:
            self.generation_ended = True
            self.cpu_ticks = -1
            self.on_generation_end()
        elif "join" in message:
            self.has_waiting_rank = True
            return
        elif "generation" in message:
            self.generation = Generation(**({"number": 0} | message["generation"]))
            self.generation_ended = False
            self.has_signed_in = False
            self.has_waiting_rank = False
        self.answers.put(message)

    def _leave_if_stuck(self, now: float) -> None:
        """Leave the run if the main thread sleeps instead of signing in, because a gloo collective may never end.

        After a collective has failed in the middle of a message, gloo no longer reads from that connection. A later
        collective that waits for data from this connection cannot be woken up. This rank then leaves as a lost rank,
        because a lost rank can be restarted.
        """
        state, ticks = read_main_thread()
        if bounded_wait.IS_WAITING.is_set() or state != SLEEPING_STATE or ticks != self.cpu_ticks:
            self.last_busy = now
            self.cpu_ticks = ticks
        elif now - self.last_busy > self.max_sleep_seconds:
            self.leave_as_lost(STUCK_REASON)

    def leave_as_lost(self, reason: str) -> None:
        """End this process as a lost rank, which can be restarted. The launcher reports the reason."""
        self._end_process(f"{reason}; this rank counts as lost", lost=True)

    def _announce_loss(self, reason: str) -> None:
        """Send the coordinator the reason why this process ends itself.

        Nothing is sent if another thread blocks the connection.
        """
        if not self.send_lock.acquire(timeout=SEND_SECONDS):
            return
        message = json.dumps({"lost": f"ended itself: {reason}"})
        try:
            with contextlib.suppress(OSError):
                self.socket.sendall(message.encode() + b"\n")
        finally:
            self.send_lock.release()

    def _end_process(self, reason: str, command: Sequence[str] = (), *, lost: bool = False) -> None:
        """End this process immediately, or replace it with `command`, so that it cannot write any more files."""
        print(f"this rank leaves the run: {reason}", file=sys.stderr, flush=True)
        try:
            if command:
                os.execvp(command[0], [*command])
            if lost:
                self._announce_loss(reason)
                faulthandler.dump_traceback(sys.stderr)
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(0)


def read_main_thread() -> tuple[str, int]:
    """Return the state of the main thread (a letter, see proc(5)) and its CPU time in clock ticks."""
    status = Path(f"/proc/self/task/{os.getpid()}/stat").read_text()
    fields = status.rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return fields[0], ticks


def connect_to_coordinator(address: str, timeout: float) -> socket.socket:
    """Connect to a coordinator whose address is the path of a UNIX socket or host:port.

    Raises OSError if the connection cannot be established. An established TCP connection fails if the other host has
    not acknowledged data for `timeout` seconds.
    """
    if address.startswith("/"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        return connection
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * timeout))
    disable_send_delay(connection)
    return connection


def disable_send_delay(connection: socket.socket) -> None:
    """Disable Nagle's algorithm on a TCP connection, so that short messages are sent immediately."""
    if connection.family == socket.AF_INET:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
