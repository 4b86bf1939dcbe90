"""Data workers: processes that prepare blocks of batches for a rank in advance.

A rank and its workers exchange blocks through shared anonymous memory. Anonymous memory needs no space in /dev/shm,
and the kernel frees the memory even if the processes are killed. Workers are forked at the start of an epoch. With n
workers, each worker prepares every n-th block. If a worker hangs or exits, its rank raises an error.
"""

from __future__ import annotations

import contextlib
import json
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

from common.system import foreign_text
from common.system.bounded_wait import mark_bounded_wait
from common.system.causes import Cause
from common.system.errors import CausedRuntimeError, MachineError, UserError
from common.system.processes import kill_with_parent, read_process_stat
from common.system.signals import STOP_SIGNALS, ignore_stop_signals

Samples = tuple[Tensor | None, Tensor | None]  # inputs [n, ...] and targets [n] of a block
LoadSamples = Callable[[np.ndarray], Samples]  # the argument is a block of indices, int64 [2, batches, samples]

POLL_SECONDS = 0.5  # time between two checks for a stop request while a rank waits for a block
SLOTS = 2  # maximum number of blocks that a worker prepares in advance
JOIN_TIMEOUT = 5.0  # seconds to wait for a killed worker to exit; a worker that waits for a disk exits later
PROCESS_STATES = {  # description of each state letter in /proc/PID/stat
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "is waiting for a disk",
    "R": "is running",
    "S": "is sleeping",
}


class DataWorkerError(MachineError):
    """Exception raised when a data worker exits or returns no block within its time limit."""


class DataWorker:
    """Handle through which a rank controls a forked data worker process.

    The worker prepares every `stride`-th block of `indices`, starting with block `number`.
    """

    def __init__(
        self, number: int, stride: int, load: LoadSamples, indices: Sequence[np.ndarray], slots: list[Samples]
    ) -> None:
        self.number = number
        self.slots = slots
        self.received = 0
        self.connection, worker_connection = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        arguments = (load, indices[number::stride], slots, worker_connection)
        self.process = context.Process(target=prepare_blocks, args=arguments)
        # Block stop signals until the worker ignores them; otherwise the worker could run the rank's signal handlers.
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
        """Wait up to `seconds` seconds for the next block; return True if the block is ready.

        Raises DataWorkerError if the worker has exited.
        """
        ready = wait([self.connection, self.process.sentinel], seconds)
        if self.connection in ready or self.connection.poll():
            return True
        if ready:
            raise DataWorkerError(f"{self.name} {self._describe_exit()}")
        return False

    def receive_block(self, samples: int, device: torch.device) -> Samples:
        """Return a copy of the next block, which contains `samples` samples, on a device.

        Raises UserError if a sample is invalid, and RuntimeError if the worker could not prepare the block.
        """
        try:
            failure = self.connection.recv_bytes()
        except (OSError, EOFError):
            raise DataWorkerError(f"{self.name} {self._describe_exit()}") from None
        if failure:
            report = json.loads(failure)
            if report["user_error"]:
                raise UserError(report["user_error"], cause=Cause(report["cause"]))
            raise CausedRuntimeError(f"{self.name} failed:\n{report['text']}", cause=Cause(report["cause"]))
        inputs, targets = self.slots[self.received % SLOTS]
        block = copy_samples(inputs, samples, device), copy_samples(targets, samples, device)
        self.received += 1
        # Notify the worker that the slot is free. The worker may already have exited after its last block.
        with contextlib.suppress(OSError):
            self.connection.send_bytes(b"")
        return block

    def describe_state(self) -> str:
        """Describe the state of the worker process, such as "is sleeping"."""
        try:
            letter = read_process_stat(self.process.pid or 0)[0]
        except OSError:
            return "has exited"
        return PROCESS_STATES.get(letter, "has exited")

    def _describe_exit(self) -> str:
        """Describe how the worker process has ended, such as "exited with status 1"."""
        self.process.join(JOIN_TIMEOUT)
        code = self.process.exitcode
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL; if the machine ran out of memory, lower data.workers or data.block"
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with status {code}; its last output is in the log of this rank"

    def kill_process(self) -> None:
        """Kill the worker process and close the connection."""
        self.process.kill()
        self.process.join(JOIN_TIMEOUT)
        self.connection.close()


class WorkerPool:
    """The data workers of a rank, which prepare the remaining blocks of one epoch."""

    def __init__(
        self, load: LoadSamples, indices: Sequence[np.ndarray], workers: int, example: Samples, timeout: float
    ) -> None:
        """Start the workers.

        Each element of `indices` describes one block, and `load` prepares the samples of a block on the CPU. `example`
        contains two empty tensors [0, ...] with the types and sample shapes of the inputs and of the targets. The rank
        waits at most `timeout` seconds for each block.
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
            self.kill_workers()
            raise

    def iterate_blocks(self, device: torch.device, stop_requested: Callable[[], bool]) -> Iterator[Samples]:
        """Yield the blocks in order, on a device.

        The iteration ends early if a stop is requested while the rank waits for a block. Raises DataWorkerError if a
        worker has exited, or has returned no block within the time limit.
        """
        try:
            for number, block in enumerate(self.indices):
                worker = self.workers[number % len(self.workers)]
                if not self._wait_for_block(worker, stop_requested):
                    return
                yield worker.receive_block(block[0].size, device)
        finally:
            self.kill_workers()

    @mark_bounded_wait()
    def _wait_for_block(self, worker: DataWorker, stop_requested: Callable[[], bool]) -> bool:
        """Wait for the worker's next block; return False if a stop is requested before the block is ready."""
        poll_seconds = min(POLL_SECONDS, self.timeout)
        polls = 0  # polls are counted because a clock would continue to run while the entire job is suspended
        while not worker.wait_for_block(poll_seconds):
            polls += 1
            if stop_requested():
                return False
            if polls * poll_seconds >= self.timeout:
                raise DataWorkerError(
                    f"{worker.name} has returned no batch for {self.timeout:g} s; its process "
                    f"{worker.describe_state()}; if preparing a block of batches takes this long, raise "
                    "launch.step_timeout or lower data.block"
                )
        return True

    def kill_workers(self) -> None:
        """Kill all workers."""
        for worker in self.workers:
            worker.kill_process()


def prepare_blocks(
    load: LoadSamples, indices: Sequence[np.ndarray], slots: Sequence[Samples], connection: Connection
) -> None:
    """Prepare each block of a worker as soon as a slot is free; called in the worker process."""
    ignore_stop_signals()  # the rank handles stop requests
    kill_with_parent()
    torch.set_num_threads(1)
    try:
        for number, block in enumerate(indices):
            if number >= SLOTS:
                connection.recv_bytes()  # wait until the rank has copied the previous block from this slot
            for samples, slot in zip(load(block), slots[number % SLOTS], strict=True):
                if samples is not None and slot is not None:
                    slot[: len(samples)].copy_(samples)
            connection.send_bytes(b"")  # an empty message means that the block is ready
    except Exception as error:  # noqa: BLE001 (the rank reports the error)
        report = {
            "cause": foreign_text.classify_error(error),
            "text": traceback.format_exc(),
            "user_error": str(error) if isinstance(error, UserError) else "",
        }
        connection.send_bytes(json.dumps(report).encode())


def allocate_samples(example: Samples, count: int) -> Samples:
    """Allocate shared memory for `count` samples with the types and shapes of `example`."""
    inputs, targets = example
    return allocate_shared_tensor(inputs, count), allocate_shared_tensor(targets, count)


def allocate_shared_tensor(example: Tensor | None, count: int) -> Tensor | None:
    """Allocate a tensor [count, ...] in memory that is shared with forked processes.

    The tensor has the type and sample shape of `example`. Returns None if `example` is None.
    """
    if example is None:
        return None
    shape = (max(1, count), *example.shape[1:])
    size = math.prod(shape)
    memory = mmap.mmap(-1, size * example.element_size())
    return torch.frombuffer(memory, dtype=example.dtype, count=size).view(shape)


def copy_samples(source: Tensor | None, count: int, device: torch.device) -> Tensor | None:
    """Copy the first `count` samples to a device. Returns None if `source` is None."""
    return None if source is None else source[:count].to(device, copy=True)
