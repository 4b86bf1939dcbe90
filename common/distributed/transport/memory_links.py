"""Messages between two ranks of one host: large ones through memory that both have mapped. Imports no torch.

A Unix socket connects them. It carries small messages, and for large ones a byte for each slot of the memory that is
full, and one back when it is free. So a waiting rank is woken by the socket, and learns from it at once that the other
one has died. Memory order: a slot is written before its byte is sent and read after that is received, and the lock of
the socket's queue in the kernel orders the two on every processor.

The memory has no name (memfd_create), is handed over through the socket and vanishes with its last rank. Its pages are
allocated before use (posix_fallocate): where they are lacking a message goes through the socket, and no rank ends by
SIGBUS. Linux only.
"""

from __future__ import annotations

import array
import contextlib
import functools
import itertools
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Iterable, Iterator

from common.core.processes import count_host_cores
from common.distributed.transport.socket_stream import HEADER, NOTHING, PIECE, Rest, SocketStream, copy_if_small

SLOTS = 8  # in each direction, of PIECE bytes
INLINE = 1 << 13  # bytes up to which a message goes through the socket itself
IN_SLOTS, SHARED = 1 << 63, 1 << 62  # bits of a header's length: the message is in slots; memory is handed over
RING = (1 << 64) - 1  # name of the memory of slots
NUMBER = struct.Struct("I")
SPIN = 1e-3  # seconds of polling before sleeping: waking a core takes 50 us


def choose_polling_seconds(local_size: int) -> float:
    """Return the seconds of polling before sleeping: 0 where the ranks of this host have not a core each."""
    return 0.0 if local_size > count_host_cores() else SPIN


class MemoryStream(SocketStream):
    """One end of a connection within a host, on which messages go in one direction."""

    def __init__(self, connection: socket.socket, timeout: float, spin: float) -> None:
        super().__init__(connection, timeout)
        self.spin = spin
        self.shared: dict[int, mmap.mmap] = {}
        """Memory that was handed over, by name."""
        self._slots: list[memoryview] = []
        self._next = 0  # slot
        self._free = SLOTS
        self._has_no_memory = False
        self._in_slots = False  # the message that is being read
        self._poll = select.poll()
        self._source = NOTHING
        """What is left of the message that is being written."""

    # ---- writing

    def share_memory(self, name: int, size: int) -> mmap.mmap:
        """Allocate memory and hand it to the other side, which has it after the next message. Raises OSError."""
        descriptor = allocate_memory(size)
        self._finish_steps(self._share_in_steps(name, size, descriptor))
        return self.shared[name]

    def begin_message(self, tag: int, data: memoryview) -> Rest | None:
        if len(data) <= INLINE or self._has_no_memory:
            return super().begin_message(tag, data)
        self._source = data
        steps = self._write_steps(tag, len(data))
        if not self._slots:
            try:
                descriptor = allocate_memory(SLOTS * PIECE)
            except OSError:
                self._has_no_memory = True
                return super().begin_message(tag, data)
            steps = itertools.chain(self._share_in_steps(RING, SLOTS * PIECE, descriptor), steps)
        event = next(steps, None)
        if event is None:
            return None
        self._source = copy_if_small(data)
        return functools.partial(self._finish_steps, steps, event)

    # These write without blocking; wherever the socket is not ready they yield the event to wait for.

    def _share_in_steps(self, name: int, size: int, descriptor: int) -> Iterator[int]:
        try:
            self.shared[name] = mmap.mmap(descriptor, size)
            while not self._write_now(memoryview(HEADER.pack(name, size | SHARED))):
                yield select.POLLOUT
            while not self._pass_file(descriptor):
                yield select.POLLOUT
        finally:
            os.close(descriptor)
        if name == RING:
            self._slots = divide_slots(self.shared[name])

    def _pass_file(self, descriptor: int) -> int:
        try:
            return socket.send_fds(self.socket, [b"\0"], [descriptor], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _write_steps(self, tag: int, length: int) -> Iterator[int]:
        """Write a message of `length` bytes from `_source`, which `begin_message` may replace by a copy meanwhile."""
        header = memoryview(HEADER.pack(tag, length | IN_SLOTS))
        while not self._write_now(header):
            yield select.POLLOUT
        for begin in range(0, length, PIECE):
            while not self._count_free_slots():
                yield select.POLLIN
            piece = self._source[begin : begin + PIECE]
            self._slots[self._next][: len(piece)] = piece
            self._next = (self._next + 1) % SLOTS
            self._free -= 1
            while not self._write_now(memoryview(b"\0")):
                yield select.POLLOUT
        self._source = NOTHING

    def _count_free_slots(self) -> int:
        """Return how many slots are free."""
        if not self._free:
            try:
                self._free = len(self.socket.recv(SLOTS, socket.MSG_DONTWAIT))
            except BlockingIOError:
                return 0
            if not self._free:
                raise EOFError
        return self._free

    def _finish_steps(self, steps: Iterator[int], event: int | None = None) -> None:
        """Make all steps, waiting for `event` before the first one."""
        for wanted in itertools.chain([event] if event else [], steps):
            self._poll.register(self.socket, wanted)
            if not self._poll.poll(self.timeout * 1e3):
                raise TimeoutError

    # ---- reading

    def read_header(self, patient: bool = False) -> tuple[int, int]:
        while True:
            tag, length = super().read_header(patient)
            if not length & SHARED:
                self._in_slots = bool(length & IN_SLOTS)
                return tag, length & ~IN_SLOTS
            _, (descriptor, *_), _, _ = socket.recv_fds(self.socket, 1, 1)
            try:
                self.shared[tag] = mmap.mmap(descriptor, length & ~SHARED)
            finally:
                os.close(descriptor)
            if tag == RING:
                self._slots = divide_slots(self.shared[tag])

    def read_some(self, count: int, patient: bool = False) -> bytes:
        end = 0.0
        while True:
            try:
                data = self.socket.recv(count, socket.MSG_DONTWAIT)
            except BlockingIOError:
                now = time.perf_counter()
                end = end or now + self.spin
                if now >= end:
                    return super().read_some(count, patient)
                os.sched_yield()  # not asleep: whoever sleeps is woken late
                continue
            if not data:
                raise EOFError
            return data

    # Numbers alone, for those who have shared memory of their own and send nothing else from then on.

    def send_number(self, number: int) -> None:
        """Send a number below 2^32."""
        self.socket.send(NUMBER.pack(number))

    def receive_numbers(self) -> Iterable[int]:
        """Wait for numbers. Raises EOFError if the other side has closed."""
        return array.array("I", self.read_some(1024 * NUMBER.size))

    def read_into(self, target: memoryview) -> None:
        if not self._in_slots:
            return super().read_into(target)
        for piece in self.read_pieces(len(target)):
            target[: len(piece)] = piece
            target = target[len(piece) :]

    def read_pieces(self, length: int) -> Iterator[memoryview]:
        if not self._in_slots:
            yield from super().read_pieces(length)
            return
        full = 0
        for begin in range(0, length, PIECE):
            if not full:
                full = len(self.read_some(-(-(length - begin) // PIECE)))  # not more: a header may follow
            full -= 1
            yield self._slots[self._next][: min(PIECE, length - begin)]
            self._next = (self._next + 1) % SLOTS
            with contextlib.suppress(OSError):  # the writer may have sent its last message and left
                self.socket.send(b"\0")
        self._in_slots = False


def allocate_memory(size: int) -> int:
    """Return the file of memory without a name whose pages exist. Raises OSError."""
    descriptor = os.memfd_create("rank")
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def divide_slots(memory: mmap.mmap) -> list[memoryview]:
    """Return the slots in memory of SLOTS * PIECE bytes."""
    view = memoryview(memory)
    return [view[begin : begin + PIECE] for begin in range(0, SLOTS * PIECE, PIECE)]
