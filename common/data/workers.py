"""Data workers: processes that prepare blocks of batches ahead for a rank, and their error if one hangs or exits.

Blocks are passed through anonymous memory that a rank shares with its workers. It needs no space in /dev/shm and is
freed when the processes are killed. Workers are forked at the start of an epoch, and each of n workers prepares every
n-th block.
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
from common.core.processes import kill_with_parent, read_process_stat
from common.core.signals import STOP_SIGNALS, ignore_stop_signals

Samples = tuple[Tensor | None, Tensor | None]  # inputs [n, ...] and targets [n] of a block
LoadSamples = Callable[[np.ndarray], Samples]  # takes a block's indices, int64 [2, batches, samples of this rank]

POLL_SECONDS = 0.5  # between two checks for a stop request while a rank waits for a block
SLOTS = 2  # blocks that a worker prepares ahead
JOIN_TIMEOUT = 5.0  # seconds for a killed worker to exit; a worker that waits for a disk exits later
PROCESS_STATES = {  # by the letter in /proc/PID/stat
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "waits for a disk",
    "R": "computes",
    "S": "sleeps",
}


class DataWorkerError(MachineError):
    """A data worker has exited, or has returned no block within its time limit."""


class DataWorker:
    """Handle of a forked process that prepares every `stride`-th block, starting with block `number`."""

    def __init__(
        self, number: int, stride: int, load: LoadSamples, indices: Sequence[np.ndarray], slots: list[Samples]
    ) -> None:
        self.number = number
        self.slots = slots
        self.received = 0
        self.connection, worker_connection = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        arguments = (load, indices[number::stride], slots, worker_connection)
        self.process = context.Process(target=make_blocks, args=arguments)
        # a signal between the fork and `ignore_stop_signals` would run the rank's handlers in the worker
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        worker_connection.close()

    @property
    def name(self) -> str:
        return f"data worker {self.number} (pid {self.process.pid})"

    def wait_for_block(self, seconds: float) -> bool:
        """Wait for the next block; return False after `seconds`. Raises DataWorkerError if the worker has exited."""
        ready = wait([self.connection, self.process.sentinel], seconds)
        if self.connection in ready or self.connection.poll():
            return True
        if ready:
            raise DataWorkerError(f"{self.name} {self._describe_end()}")
        return False

    def take_block(self, samples: int, device: torch.device) -> Samples:
        """Return a copy of the next block of `samples` samples on a device. Raises RuntimeError if preparing failed."""
        try:
            failure = self.connection.recv_bytes()
        except (OSError, EOFError):
            raise DataWorkerError(f"{self.name} {self._describe_end()}") from None
        if failure:
            raise RuntimeError(f"{self.name} failed:\n{failure.decode(errors='replace')}")
        inputs, targets = self.slots[self.received % SLOTS]
        block = copy_samples(inputs, samples, device), copy_samples(targets, samples, device)
        self.received += 1
        with contextlib.suppress(OSError):  # the worker exits after its last block
            self.connection.send_bytes(b"")
        return block

    def describe_state(self) -> str:
        """Describe what the process is doing."""
        try:
            letter = read_process_stat(self.process.pid or 0)[0]
        except OSError:
            return "has exited"
        return PROCESS_STATES.get(letter, "has exited")

    def _describe_end(self) -> str:
        self.process.join(JOIN_TIMEOUT)
        code = self.process.exitcode
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL, by hand or for lack of memory (then lower data.workers or data.block)"
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with status {code}; its last output is in this rank's log"

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join(JOIN_TIMEOUT)
        self.connection.close()


class WorkerPool:
    """The data workers of a rank for the remaining blocks of one epoch."""

    def __init__(
        self, load: LoadSamples, indices: Sequence[np.ndarray], workers: int, example: Samples, timeout: float
    ) -> None:
        """Start the workers.

        `load` prepares the samples of an item of `indices` on the CPU, with the types and shapes of `example` [0, ...].
        A rank waits at most `timeout` seconds for a block.
        """
        self.indices = indices
        self.timeout = timeout
        self.workers: list[DataWorker] = []
        largest = max((block[0].size for block in indices), default=0)
        stride = min(workers, len(indices))
        try:
            for number in range(stride):
                slots = [allocate_samples(example, largest) for _ in range(SLOTS)]
                self.workers.append(DataWorker(number, stride, load, indices, slots))
        except BaseException:
            self.end()
            raise

    def iterate_blocks(self, device: torch.device, stop_requested: Callable[[], bool]) -> Iterator[Samples]:
        """Yield the blocks in order, on a device; end early if a stop is requested while waiting for one.

        Raises DataWorkerError if a worker has exited, or has returned no block in time.
        """
        try:
            for number, block in enumerate(self.indices):
                worker = self.workers[number % len(self.workers)]
                if not self._wait_for_block(worker, stop_requested):
                    return
                yield worker.take_block(block[0].size, device)
        finally:
            self.end()

    def _wait_for_block(self, worker: DataWorker, stop_requested: Callable[[], bool]) -> bool:
        """Wait for the worker's next block; return False if a stop is requested first."""
        poll_seconds = min(POLL_SECONDS, self.timeout)
        polls = 0  # counted, because a clock advances while the whole job is suspended
        while not worker.wait_for_block(poll_seconds):
            polls += 1
            if stop_requested():
                return False
            if polls * poll_seconds >= self.timeout:
                raise DataWorkerError(
                    f"{worker.name} has returned no batch for {self.timeout:g} s and {worker.describe_state()}; "
                    "if preparing a block of batches takes that long, raise launch.step_timeout or lower data.block"
                )
        return True

    def end(self) -> None:
        """Kill all workers."""
        for worker in self.workers:
            worker.end()


def make_blocks(
    load: LoadSamples, indices: Sequence[np.ndarray], slots: Sequence[Samples], connection: Connection
) -> None:
    """Prepare the blocks of a worker, each as soon as a slot is free. The worker's process runs this function."""
    ignore_stop_signals()  # its rank handles them
    kill_with_parent()
    torch.set_num_threads(1)
    try:
        for number, block in enumerate(indices):
            if number >= SLOTS:
                connection.recv_bytes()  # the rank has copied the slot
            for samples, slot in zip(load(block), slots[number % SLOTS], strict=True):
                if samples is not None and slot is not None:
                    slot[: len(samples)].copy_(samples)
            connection.send_bytes(b"")
    except Exception:  # noqa: BLE001 (the rank reports it)
        connection.send_bytes(traceback.format_exc().encode())


def allocate_samples(example: Samples, count: int) -> Samples:
    """Allocate shared memory for `count` samples like those of `example`."""
    inputs, targets = example
    return allocate_shared(inputs, count), allocate_shared(targets, count)


def allocate_shared(example: Tensor | None, count: int) -> Tensor | None:
    """Allocate a tensor [count, ...] in memory that forked processes share; None if there is no example."""
    if example is None:
        return None
    shape = (max(1, count), *example.shape[1:])
    size = math.prod(shape)
    memory = mmap.mmap(-1, size * example.element_size())
    return torch.frombuffer(memory, dtype=example.dtype, count=size).view(shape)


def copy_samples(source: Tensor | None, count: int, device: torch.device) -> Tensor | None:
    """Copy the first `count` samples to a device; None stays None."""
    return None if source is None else source[:count].to(device, copy=True)
