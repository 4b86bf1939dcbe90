"""Messages between ranks of one host: one slot of shared memory a message, and a named pipe a rank as doorbell.

What it buys: a twentieth of the latency of a gloo socket, which wakes two threads for each message. All of it stays
behind `open_shared_memory`, which returns None where it cannot work; the messages then go through gloo.

A slot is reused in the next step. Its reader has finished with it by then: the sender of an activation continues only
after it has received the gradient computed from it, the sender of a gradient only after the next activation.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import secrets
import select
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.rendezvous import World
from common.pipeline.schedules import Action

ALIGN = 64  # bytes of a cache line, at which each slot begins
SPIN = 1e-3  # seconds of polling before sleeping: waking a core takes 50 us
OLD = 600.0  # seconds after which a folder is left over from a killed process
SHARED = Path("/dev/shm")  # noqa: S108 (a folder of our own is made in it)


class Route(NamedTuple):
    """A message: the action that consumes it, the ranks that send and receive it, and its shape [n, ...]."""

    consumer: Action
    source: int
    target: int
    shape: torch.Size


def open_shared_memory(world: World, near: Sequence[Route], dtype: torch.dtype) -> SharedMemory | None:
    """Open the memory for messages between ranks of the same host; None if /dev/shm lacks space. All ranks call it."""
    if world.size == 1:
        return None
    base = SHARED if SHARED.is_dir() else Path(tempfile.gettempdir())
    members = [rank for rank in range(world.size) if world.hosts[rank] == world.hosts[world.rank]]
    # a name of its own for each host: containers may share a /dev/shm
    folder = base / f"pipeline-{world.broadcast(secrets.token_hex(8))}-{members[0]}"
    opened: SharedMemory | None = None
    try:
        with contextlib.suppress(OSError):
            if world.rank == members[0]:
                remove_old_folders(base)
                make_slots_folder(folder, members, sum(count_slot_bytes(route, dtype) for route in near))
        dist.barrier(world.group)
        with contextlib.suppress(OSError, ValueError):
            opened = SharedMemory(world, near, dtype, folder)
        everywhere = world.broadcast(all(world.gather(opened is not None)))
    finally:
        if world.rank == members[0]:
            shutil.rmtree(folder, ignore_errors=True)  # all have opened what is in it
    return opened if everywhere else None


def remove_old_folders(base: Path) -> None:
    """Remove what killed processes of this user have left: a folder is needed for moments only."""
    for left in base.glob("pipeline-*"):
        with contextlib.suppress(OSError):
            status = left.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > OLD:
                shutil.rmtree(left)


def make_slots_folder(folder: Path, members: Sequence[int], size: int) -> None:
    """Make a private folder with the slots' memory, `size` bytes, and a pipe for each rank. Raises OSError."""
    folder.mkdir(mode=0o700)
    with open(folder / "slots", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(ALIGN, size))
    for rank in members:  # only where the space is there: without its pipe no rank opens the memory
        os.mkfifo(folder / str(rank), 0o600)


def count_slot_bytes(route: Route, dtype: torch.dtype) -> int:
    """Return the bytes of a message's slot, a multiple of ALIGN."""
    return -(-route.shape.numel() * dtype.itemsize // ALIGN) * ALIGN


def choose_polling_seconds(local_size: int) -> float:
    """Return the seconds of polling before sleeping: 0 where the ranks of this host have not a core each."""
    # under SLURM a rank may be bound to its own cores, and sees fewer than the job has on this host
    allowed = max(len(os.sched_getaffinity(0)), int(os.environ.get("SLURM_CPUS_ON_NODE") or 0))
    return 0.0 if local_size > allowed else SPIN


class SharedMemory:
    """The slots and pipes of a host, mapped into one of its ranks."""

    def __init__(self, world: World, near: Sequence[Route], dtype: torch.dtype, folder: Path) -> None:
        self.world = world
        self.slots: dict[Action, Tensor] = {}
        self.numbers = {route.consumer: number for number, route in enumerate(near)}
        with open(folder / "slots", "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        start = 0
        for route in near:  # no slot is a view of another: autograd takes a write to one view as a write to all
            slot = torch.frombuffer(memory, dtype=dtype, count=route.shape.numel(), offset=start)
            self.slots[route.consumer] = slot.view(route.shape)
            start += count_slot_bytes(route, dtype)
        ranks = {route.target for route in near if world.rank == route.source} | {world.rank}
        # open for reading and writing, so that opening does not block
        self.pipes = {rank: os.open(folder / str(rank), os.O_RDWR | os.O_NONBLOCK) for rank in ranks}
        self.inbox = select.poll()
        self.inbox.register(self.pipes[world.rank], select.POLLIN)
        self.full: set[int] = set()
        self.spin = choose_polling_seconds(world.local_size)

    def send(self, consumer: Action, value: Tensor) -> None:
        """Copy a tensor to its slot and notify the rank that consumes it."""
        self.slots[consumer].copy_(value)
        os.write(self.pipes[consumer.stage % self.world.size], array.array("I", [self.numbers[consumer]]).tobytes())

    def receive(self, consumer: Action) -> Tensor:
        """Wait for a message and return its slot. Raises TimeoutError after launch.step_timeout."""
        number = self.numbers[consumer]
        if number not in self.full:
            self._wait(number, consumer)
        self.full.remove(number)
        return self.slots[consumer]

    def _wait(self, number: int, consumer: Action) -> None:
        began = time.perf_counter()
        while number not in self.full:
            try:
                self.full.update(array.array("I", os.read(self.pipes[self.world.rank], 4096)))
            except BlockingIOError:
                if time.perf_counter() - began < self.spin:
                    os.sched_yield()
                elif not self.inbox.poll(self.world.timeout.total_seconds() * 1e3):
                    source = consumer.stage + (-1 if consumer.kind == "F" else 1)
                    raise TimeoutError(
                        f"rank {self.world.rank} waited {self.world.timeout.total_seconds():g} s for rank "
                        f"{source % self.world.size}: nothing came for the {consumer}; see its log, or raise "
                        "launch.step_timeout"
                    ) from None
