"""Messages between two ranks on the same host, using shared memory for large messages. Linux only.

The two ranks are connected by a Unix socket, which carries small messages. Large messages are passed through slots of
shared memory. The writer sends one byte through the socket for each slot that it has filled, and the reader sends one
byte back for each slot that it has emptied. A waiting rank therefore sleeps on the socket and notices immediately when
the peer exits. A slot is written before its byte is sent, and read after the byte has been received. Both system calls
acquire the lock of the socket's queue, which keeps the memory accesses in this order on every processor.

The shared memory is an anonymous file (memfd_create). Its descriptor is passed through the socket, and the kernel frees
the memory when both ranks have exited. The pages are allocated before use (posix_fallocate), because a rank that writes
to a page that cannot be allocated is killed by SIGBUS. If the allocation fails, all messages are sent through the
socket. This module does not import torch.
"""

from __future__ import annotations

import array
import contextlib
import errno
import functools
import itertools
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Iterable, Iterator

from common.ranks.links.socket_stream import EMPTY_VIEW, HEADER, PIECE_BYTES, FinishWrite, SocketStream, copy_if_small
from common.system.processes import count_host_cores

SLOT_COUNT = 8  # slots per direction, each of PIECE_BYTES bytes
SLOT_MEMORY_BYTES = SLOT_COUNT * PIECE_BYTES
MAX_SOCKET_BYTES = 1 << 13  # maximum size of a message that is sent through the socket itself
IN_SLOTS_BIT = 1 << 63  # set in the length field of a header if the message is in slots
MEMORY_BIT = 1 << 62  # set in the length field if the next byte passes shared memory of that length
SLOT_MEMORY_NAME = (1 << 64) - 1
NUMBER = struct.Struct("I")
POLLING_SECONDS = 1e-3  # time to poll before sleeping, because waking a sleeping core takes about 50 us


def choose_polling_seconds(local_size: int) -> float:
    """Return how long a waiting rank polls before it sleeps, in seconds.

    The time is 0 if this host has more ranks than cores.
    """
    return 0.0 if local_size > count_host_cores() else POLLING_SECONDS


class MemoryStream(SocketStream):
    """One end of a one-way connection between two ranks on the same host."""

    def __init__(self, connection: socket.socket, timeout: float, polling_seconds: float) -> None:
        super().__init__(connection, timeout)
        self.polling_seconds = polling_seconds
        self.shared: dict[int, mmap.mmap] = {}
        """Shared memory that both ranks have mapped, by number."""
        self._slots: list[memoryview] = []
        self._next_slot = 0
        self._free_slots = SLOT_COUNT
        self._lacks_memory = False
        self._message_in_slots = False  # whether the message being read is in slots
        self._poll = select.poll()
        self._source = EMPTY_VIEW
        """Data of the message being written; empty if no message is being written."""

    # ---- writing

    def share_memory(self, name: int, size: int) -> mmap.mmap:
        """Allocate shared memory and pass it to the peer. Raises OSError.

        The peer maps the memory before it reads the next message. `name` is the number by which `shared` refers to the
        memory.
        """
        descriptor = allocate_memory(size)
        self._run_steps(self._share_memory_in_steps(name, size, descriptor))
        return self.shared[name]

    def begin_message(self, tag: int, data: memoryview) -> FinishWrite | None:
        if len(data) <= MAX_SOCKET_BYTES or self._lacks_memory:
            return super().begin_message(tag, data)
        self._source = data
        steps = self._write_message_in_steps(tag, len(data))
        if not self._slots:
            try:
                descriptor = allocate_memory(SLOT_MEMORY_BYTES)
            except OSError:
                self._lacks_memory = True
                return super().begin_message(tag, data)
            sharing = self._share_memory_in_steps(SLOT_MEMORY_NAME, SLOT_MEMORY_BYTES, descriptor)
            steps = itertools.chain(sharing, steps)
        event = next(steps, None)
        if event is None:
            return None
        self._source = copy_if_small(data)
        return functools.partial(self._run_steps, steps, event)

    # The following generators write without blocking. If the socket is not ready, a generator yields
    # the event to wait for.

    def _share_memory_in_steps(self, name: int, size: int, descriptor: int) -> Iterator[int]:
        try:
            self.shared[name] = mmap.mmap(descriptor, size)
            header = memoryview(HEADER.pack(name, size | MEMORY_BIT))
            while not self.write_without_blocking(header):
                yield select.POLLOUT
            while not self._send_descriptor(descriptor):
                yield select.POLLOUT
        finally:
            os.close(descriptor)
        if name == SLOT_MEMORY_NAME:
            self._slots = divide_into_slots(self.shared[name])

    def _send_descriptor(self, descriptor: int) -> int:
        # socket.send_fds ignores its argument for flags.
        descriptors = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
        try:
            return self.socket.sendmsg([b"\0"], [descriptors], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _write_message_in_steps(self, tag: int, length: int) -> Iterator[int]:
        """Write a message of `length` bytes from `_source`, which `begin_message` may replace with a copy."""
        header = memoryview(HEADER.pack(tag, length | IN_SLOTS_BIT))
        while not self.write_without_blocking(header):
            yield select.POLLOUT
        for start in range(0, length, PIECE_BYTES):
            while not self._count_free_slots():
                yield select.POLLIN
            piece = self._source[start : start + PIECE_BYTES]
            self._slots[self._next_slot][: len(piece)] = piece
            self._next_slot = (self._next_slot + 1) % SLOT_COUNT
            self._free_slots -= 1
            while not self.write_without_blocking(memoryview(b"\0")):
                yield select.POLLOUT
        self._source = EMPTY_VIEW

    def _count_free_slots(self) -> int:
        """Return the number of free slots. Read the peer's notifications if no slot is free."""
        if not self._free_slots:
            try:
                self._free_slots = len(self.socket.recv(SLOT_COUNT, socket.MSG_DONTWAIT))
            except BlockingIOError:
                return 0
            if not self._free_slots:
                raise EOFError
        return self._free_slots

    def _run_steps(self, steps: Iterator[int], first_event: int | None = None) -> None:
        """Run all steps and wait for each event that a step yields.

        If `first_event` is given, wait for it before the first step.
        """
        for event in itertools.chain([first_event] if first_event else [], steps):
            self._poll.register(self.socket, event)
            if not self._poll.poll(self.timeout * 1e3):
                raise TimeoutError

    # ---- reading

    def read_header(self, patient: bool = False) -> tuple[int, int]:
        while True:
            tag, length = super().read_header(patient)
            if not length & MEMORY_BIT:
                self._message_in_slots = bool(length & IN_SLOTS_BIT)
                return tag, length & ~IN_SLOTS_BIT
            data, descriptors, _, _ = socket.recv_fds(self.socket, 1, 1)
            if not data:
                raise EOFError
            if not descriptors:  # the kernel drops a descriptor if this process cannot open another file
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            try:
                self.shared[tag] = mmap.mmap(descriptors[0], length & ~MEMORY_BIT)
            finally:
                os.close(descriptors[0])
            if tag == SLOT_MEMORY_NAME:
                self._slots = divide_into_slots(self.shared[tag])

    def read_available_bytes(self, count: int, patient: bool = False) -> bytes:
        polling_end = 0.0
        while True:
            try:
                data = self.socket.recv(count, socket.MSG_DONTWAIT)
            except BlockingIOError:
                now = time.perf_counter()
                polling_end = polling_end or now + self.polling_seconds
                if now >= polling_end:
                    return super().read_available_bytes(count, patient)
                os.sched_yield()  # a sleeping thread would wake up too late
                continue
            if not data:
                raise EOFError
            return data

    # The next two methods are for callers that use `share_memory` and then send only numbers instead of messages.

    def send_number(self, number: int) -> None:
        """Send a nonnegative integer below 2^32."""
        self.socket.send(NUMBER.pack(number))

    def receive_numbers(self) -> Iterable[int]:
        """Wait for at least one number and return all numbers that have arrived.

        Raises EOFError if the peer closed the connection.
        """
        return array.array("I", self.read_available_bytes(1024 * NUMBER.size))

    def fill_buffer(self, target: memoryview) -> None:
        if not self._message_in_slots:
            return super().fill_buffer(target)
        for piece in self.read_pieces(len(target)):
            target[: len(piece)] = piece
            target = target[len(piece) :]

    def read_pieces(self, length: int) -> Iterator[memoryview]:
        if not self._message_in_slots:
            yield from super().read_pieces(length)
            return
        full_slots = 0
        for start in range(0, length, PIECE_BYTES):
            remaining = length - start
            if not full_slots:
                # read only the bytes of this message, because a header may follow
                full_slots = len(self.read_available_bytes(-(-remaining // PIECE_BYTES)))
            full_slots -= 1
            yield self._slots[self._next_slot][: min(PIECE_BYTES, remaining)]
            self._next_slot = (self._next_slot + 1) % SLOT_COUNT
            with contextlib.suppress(OSError):  # the writer may have exited after its last message
                self.socket.send(b"\0")
        self._message_in_slots = False


def allocate_memory(size: int) -> int:
    """Allocate all pages of anonymous memory and return a file descriptor of the memory. Raises OSError."""
    descriptor = os.memfd_create("rank")
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def divide_into_slots(memory: mmap.mmap) -> list[memoryview]:
    """Divide memory of SLOT_MEMORY_BYTES bytes into slots."""
    view = memoryview(memory)
    return [view[start : start + PIECE_BYTES] for start in range(0, SLOT_MEMORY_BYTES, PIECE_BYTES)]
