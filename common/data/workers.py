"""Processes beside a rank that make blocks of batches ahead, and the error where one of them stands still or ends.

Blocks come back through anonymous memory that a rank shares with its workers. It needs no space in /dev/shm, and
nothing is left of it when a process is killed. Workers are forked when an epoch begins, and each of n workers makes
every n-th block.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait

import numpy as np
import torch
from torch import Tensor

from common.core.errors import MachineError
from common.core.processes import die_with_parent, read_process_stat
from common.core.signals import STOP_SIGNALS, ignore_stop_signals

Samples = tuple[Tensor | None, Tensor | None]  # inputs [n, ...] and targets [n] of a block
LoadSamples = Callable[[np.ndarray], Samples]  # of a block's indices, int64 [2, batches, samples of this rank]

POLL_SECONDS = 0.5  # between two looks at a stop request, while a rank waits for a block
SLOTS = 2  # blocks that a worker makes ahead
JOIN_SECONDS = 5.0  # for the end of a killed worker: one that waits for a disk ends later
STATES = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "waits for a disk",
    "R": "computes",
    "S": "sleeps",
}  # by the letter in /proc/PID/stat


class DataWorkerError(MachineError):
    """A data worker has ended, or has made no block for too long."""


class Worker:
    """A forked process that makes every `stride`-th block from `number` on, as its rank sees it."""

    def __init__(
        self, number: int, stride: int, load: LoadSamples, indices: Sequence[np.ndarray], slots: list[Samples]
    ) -> None:
        self.number, self.slots = number, slots
        self.connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=make_blocks, args=(load, indices[number::stride], slots, theirs))
        # a signal between the fork and `ignore_stop_signals` would run the rank's handlers in the worker
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        theirs.close()
        self.received = 0

    @property
    def name(self) -> str:
        return f"data worker {self.number} (pid {self.process.pid})"

    def wait_for_block(self, seconds: float) -> bool:
        """Return True once the next block is there. Raises DataWorkerError where the worker has ended instead."""
        ready = wait([self.connection, self.process.sentinel], seconds)
        if self.connection in ready or self.connection.poll():
            return True
        if ready:
            raise DataWorkerError(f"{self.name} {self._describe_end()}")
        return False

    def take_block(self, samples: int, device: torch.device) -> Samples:
        """Return a copy of the next block, of so many samples, on a device. Raises RuntimeError where that failed."""
        try:
            failure = self.connection.recv_bytes()
        except (OSError, EOFError):
            raise DataWorkerError(f"{self.name} {self._describe_end()}") from None
        if failure:
            raise RuntimeError(f"{self.name} failed:\n{failure.decode(errors='replace')}")
        inputs, targets = self.slots[self.received % SLOTS]
        block = copy_samples(inputs, samples, device), copy_samples(targets, samples, device)
        self.received += 1
        with contextlib.suppress(OSError):  # it has made its last block and ended
            self.connection.send_bytes(b"")
        return block

    def describe_state(self) -> str:
        """Describe what the process does now."""
        try:
            letter = read_process_stat(self.process.pid or 0)[0]
        except OSError:
            return "has ended"
        return STATES.get(letter, "has ended")

    def _describe_end(self) -> str:
        self.process.join(JOIN_SECONDS)
        code = self.process.exitcode
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL, by hand or because memory is short (then lower data.workers or data.block)"
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit status {code}; its last words are in this rank's log"

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join(JOIN_SECONDS)
        self.connection.close()


class WorkerPool:
    """The workers of a rank for one epoch, or the rest of one."""

    def __init__(
        self, load: LoadSamples, indices: Sequence[np.ndarray], workers: int, example: Samples, timeout: float
    ) -> None:
        """`load` makes samples like those of `example` [0, ...] from an item of `indices`, on the CPU.

        A rank waits `timeout` seconds for a block.
        """
        self.indices, self.timeout = indices, timeout
        largest = max((block[0].size for block in indices), default=0)
        self.workers: list[Worker] = []
        stride = min(workers, len(indices))
        try:
            for number in range(stride):
                slots = [allocate_samples(example, largest) for _ in range(SLOTS)]
                self.workers.append(Worker(number, stride, load, indices, slots))
        except BaseException:
            self.end()
            raise

    def iterate_blocks(self, device: torch.device, stop_requested: Callable[[], bool]) -> Iterator[Samples]:
        """Yield the blocks in their order, on a device; end early where a stop is requested while one is waited for.

        Raises DataWorkerError where a worker has ended, or has made no block in time.
        """
        try:
            for number, block in enumerate(self.indices):
                worker = self.workers[number % len(self.workers)]
                if not self._wait_for_block(worker, stop_requested):
                    return
                yield worker.take_block(block[0].size, device)
        finally:
            self.end()

    def _wait_for_block(self, worker: Worker, stop_requested: Callable[[], bool]) -> bool:
        """Return True once the worker's next block is there, False where a stop is requested before that."""
        pause = min(POLL_SECONDS, self.timeout)
        polls = 0  # counted, because a clock runs on while a whole job is suspended
        while not worker.wait_for_block(pause):
            polls += 1
            if stop_requested():
                return False
            if polls * pause >= self.timeout:
                raise DataWorkerError(
                    f"{worker.name} has made no batch for {self.timeout:g} s and {worker.describe_state()}; "
                    "where making a block of batches takes that long, raise launch.step_timeout or lower data.block"
                )
        return True

    def end(self) -> None:
        """Kill all workers."""
        for worker in self.workers:
            worker.end()


def make_blocks(
    load: LoadSamples, indices: Sequence[np.ndarray], slots: Sequence[Samples], connection: Connection
) -> None:
    """Make the blocks of a worker, each as soon as a slot is free: the body of its process."""
    ignore_stop_signals()  # which are for its rank
    die_with_parent()
    torch.set_num_threads(1)
    try:
        for number, block in enumerate(indices):
            if number >= SLOTS:
                connection.recv_bytes()  # the rank has copied what was in the slot
            for value, slot in zip(load(block), slots[number % SLOTS], strict=True):
                if value is not None and slot is not None:
                    slot[: len(value)].copy_(value)
            connection.send_bytes(b"")
    except Exception:  # noqa: BLE001 (the rank reports it)
        connection.send_bytes(traceback.format_exc().encode())


def allocate_samples(example: Samples, count: int) -> Samples:
    """Allocate shared memory for `count` samples like those of `example`."""
    inputs, targets = example
    return allocate_shared(inputs, count), allocate_shared(targets, count)


def allocate_shared(example: Tensor | None, count: int) -> Tensor | None:
    """Allocate a tensor [count, ...] in memory that forked processes share; None without an example."""
    if example is None:
        return None
    shape = (max(1, count), *example.shape[1:])
    numbers = math.prod(shape)
    memory = mmap.mmap(-1, numbers * example.element_size())
    return torch.frombuffer(memory, dtype=example.dtype, count=numbers).view(shape)


def copy_samples(source: Tensor | None, count: int, device: torch.device) -> Tensor | None:
    """Copy the first `count` samples to a device."""
    return None if source is None else source[:count].to(device, copy=True)
