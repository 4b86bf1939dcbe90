"""Messages between processes of one host: a slot of shared memory for each, and a pipe that tells which one is full.

Twenty times less latency than a socket of gloo, which wakes two threads for each message. A slot is reused in the
next step. By then its reader is done with it: an activation's sender goes on only when it has the gradient that its
reader made of it, and a gradient's sender only when it has the next activation from its reader.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from common.distributed.rendezvous import World
from common.pipeline.schedules import Action

ALIGN = 64  # bytes; a slot begins a cache line
SPIN = 1e-3  # seconds of looking before sleeping: a core that sleeps takes 50 us to wake
OLD = 600.0  # seconds
SHARED = Path("/dev/shm")  # noqa: S108 (a folder of our own is made in it)


class Route(NamedTuple):
    """A message: who consumes it, from which to which process it goes, and its shape."""

    consumer: Action
    source: int
    target: int
    shape: torch.Size


def open_shared_memory(world: World, near: Sequence[Route], dtype: torch.dtype) -> SharedMemory | None:
    """Memory for messages between processes of the same host, or None where there is no room. All ranks call it."""
    if world.size == 1:
        return None
    leads = world.hosts.index(world.hosts[world.rank]) == world.rank
    folder = make_folder(near, dtype, world.hosts[world.rank], world) if leads else ""
    folders = dict(world.broadcast([pair for pair in world.gather((world.hosts[world.rank], folder)) if pair[1]]))
    opened: SharedMemory | None = None
    with contextlib.suppress(OSError, RuntimeError, KeyError):
        opened = SharedMemory(world, near, dtype, Path(folders[world.hosts[world.rank]]))
    try:
        everywhere = world.broadcast(all(world.gather(opened is not None)))
    finally:
        if leads and folder:
            shutil.rmtree(folder, ignore_errors=True)  # all have opened what is in it
    return opened if everywhere else None


def make_folder(near: Sequence[Route], dtype: torch.dtype, host: str, world: World) -> str:
    """A private folder with the slots' memory and each process's pipe; empty where there is no room."""
    folder, place = "", SHARED if SHARED.is_dir() else Path(tempfile.gettempdir())
    for left in place.glob("pipeline-*"):  # by a process that was killed: a folder is needed for moments only
        with contextlib.suppress(OSError):
            status = left.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > OLD:
                shutil.rmtree(left, ignore_errors=True)
    try:
        folder = tempfile.mkdtemp(prefix="pipeline-", dir=place)
        with open(Path(folder, "slots"), "wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(ALIGN, sum(count_slot_bytes(route, dtype) for route in near)))
        for rank in range(world.size):
            if world.hosts[rank] == host:
                os.mkfifo(Path(folder, str(rank)), 0o600)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        return ""
    return folder


def count_slot_bytes(route: Route, dtype: torch.dtype) -> int:
    """Bytes of a slot."""
    return -(-route.shape.numel() * dtype.itemsize // ALIGN) * ALIGN


class SharedMemory:
    """The slots and pipes of a host, as one of its processes sees them."""

    def __init__(self, world: World, near: Sequence[Route], dtype: torch.dtype, folder: Path) -> None:
        self.world = world
        self.slots: dict[Action, Tensor] = {}
        self.numbers = {route.consumer: number for number, route in enumerate(near)}
        path = folder / "slots"
        size = path.stat().st_size // dtype.itemsize
        storage = torch.from_file(str(path), shared=True, size=size, dtype=dtype).untyped_storage()
        start = 0
        for route in near:
            slot = torch.empty(0, dtype=dtype)  # no view: autograd takes a write into one view for a write into all
            self.slots[route.consumer] = slot.set_(storage, start // dtype.itemsize, route.shape)  # type: ignore[call-overload]
            start += count_slot_bytes(route, dtype)
        ranks = {route.target for route in near if world.rank == route.source} | {world.rank}
        # open for both, so that opening waits for nobody
        self.pipes = {rank: os.open(folder / str(rank), os.O_RDWR | os.O_NONBLOCK) for rank in ranks}
        self.inbox = select.poll()
        self.inbox.register(self.pipes[world.rank], select.POLLIN)
        self.full: set[int] = set()
        # under SLURM a process may be bound to cores of its own: the job then has more on this host than it sees
        allowed = max(len(os.sched_getaffinity(0)), int(os.environ.get("SLURM_CPUS_ON_NODE") or 0))
        self.spin = 0.0 if world.local_size > allowed else SPIN

    def give(self, consumer: Action, value: Tensor) -> None:
        self.slots[consumer].copy_(value)
        os.write(self.pipes[consumer.stage % self.world.size], array.array("I", [self.numbers[consumer]]).tobytes())

    def take(self, consumer: Action) -> Tensor:
        """Wait for a message. Raises TimeoutError when it does not come within the step's time-out."""
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
