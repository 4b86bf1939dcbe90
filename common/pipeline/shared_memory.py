"""Messages between ranks of one host, each in its slot of shared memory.

A message has a twentieth of the latency of a gloo socket, which wakes two threads for each message, and its reader
needs no copy. Memory and notifications are those of the links (common/distributed/transport/memory_links.py). The
entry point is `open_shared_memory`. It returns None if shared memory cannot be used; messages then go through gloo.

A slot is reused in the next step. Its reader has finished with it by then: the sender of an activation continues only
after it has received the gradient computed from it, the sender of a gradient only after the next activation.
"""

from __future__ import annotations

import contextlib
import mmap
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from common.core.errors import UnreachableError
from common.distributed.rendezvous import World
from common.distributed.transport.connecting import Links, connect_ranks
from common.distributed.transport.memory_links import MemoryStream, choose_polling_seconds
from common.pipeline.schedules import Action

SLOT_ALIGNMENT_BYTES = 64  # bytes of a cache line
SLOT_MEMORY_NAME = 0  # of the memory that a link passes
READY_TAG = 0  # of the only message of a link, which follows the memory


class MessageRoute(NamedTuple):
    """A message: its consumer, the ranks that send and receive it, its shape [n, ...]."""

    consumer: Action
    source: int
    target: int
    shape: torch.Size


def open_shared_memory(world: World, routes: Sequence[MessageRoute], dtype: torch.dtype) -> SharedMemory | None:
    """Open the memory for messages within hosts; None if a rank fails.

    All ranks call it.
    """
    if world.size == 1:
        return None
    name = world.broadcast(secrets.token_hex(8))
    memory: SharedMemory | None = None
    with contextlib.suppress(OSError, UnreachableError):
        memory = SharedMemory(world, routes, dtype, connect_ranks_of_host(world, name))
    if world.broadcast(all(world.gather(memory is not None))):
        return memory
    if memory:
        memory.links.close()
    return None


def connect_ranks_of_host(world: World, name: str) -> Links:
    """Connect the ranks of this host.

    The links are keyed by rank in `world`. Raises OSError, UnreachableError.
    """
    host = world.hosts[world.rank]
    members = [rank for rank in range(world.size) if world.hosts[rank] == host]
    assert world.store is not None
    store = world.store
    group = f"pipeline-{name}-{members[0]}"
    timeout = world.timeout.total_seconds()
    links = connect_ranks(
        members.index(world.rank), len(members),
        lambda key, value: store.set(f"{group}/{key}", value), lambda key: store.get(f"{group}/{key}"),
        group=group, address="127.0.0.1", host=host, polling_seconds=choose_polling_seconds(world.local_size),
        setup_timeout=timeout, timeout=timeout,
    )  # fmt: skip
    for link in (*links.outgoing.values(), *links.incoming.values()):
        link.peer = members[link.peer]
    outgoing = {link.peer: link for link in links.outgoing.values()}
    return Links(outgoing, {link.peer: link for link in links.incoming.values()})


def count_slot_bytes(route: MessageRoute, dtype: torch.dtype) -> int:
    """Return the size of a message's slot in bytes, a multiple of SLOT_ALIGNMENT_BYTES."""
    nbytes = route.shape.numel() * dtype.itemsize
    return -(-nbytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


class SharedMemory:
    """The slots of this rank's messages, and the links that notify their readers.

    Raises OSError, LinkError.
    """

    def __init__(self, world: World, routes: Sequence[MessageRoute], dtype: torch.dtype, links: Links) -> None:
        self.world = world
        self.links = links
        self.dtype = dtype
        self.slots: dict[Action, Tensor] = {}
        self.numbers = {route.consumer: number for number, route in enumerate(routes)}
        self.full: set[int] = set()
        self.targets: dict[int, MemoryStream] = {}
        self.sources: dict[int, MemoryStream] = {}
        for peer, outgoing in links.outgoing.items():
            sent = [route for route in routes if route.source == world.rank and route.target == peer]
            size = sum(count_slot_bytes(route, dtype) for route in sent)
            stream = outgoing.stream
            if isinstance(stream, MemoryStream):
                with contextlib.suppress(OSError):
                    memory = stream.share_memory(SLOT_MEMORY_NAME, max(SLOT_ALIGNMENT_BYTES, size))
                    self.targets[peer] = stream
                    self._map_slots(memory, sent)
            outgoing.send(READY_TAG, bytes([peer in self.targets]))
        for peer, incoming in links.incoming.items():
            received = [route for route in routes if route.source == peer and route.target == world.rank]
            is_shared = bytearray(1)
            incoming.receive(READY_TAG, is_shared)
            stream = incoming.stream
            if is_shared[0] and isinstance(stream, MemoryStream):
                self.sources[peer] = stream
                self._map_slots(stream.shared[SLOT_MEMORY_NAME], received)
        if len(self.targets) < len(links.outgoing) or len(self.sources) < len(links.incoming):
            links.close()
            raise OSError("this host has no free memory for messages")

    def _map_slots(self, memory: mmap.mmap, routes: Sequence[MessageRoute]) -> None:
        start = 0
        for route in routes:  # slots are not views of one tensor: autograd treats a write to one view as a write to all
            slot = torch.frombuffer(memory, dtype=self.dtype, count=route.shape.numel(), offset=start)
            self.slots[route.consumer] = slot.view(route.shape)
            start += count_slot_bytes(route, self.dtype)

    def send(self, consumer: Action, tensor: Tensor) -> None:
        """Copy a tensor to its slot and notify the rank that consumes it. Raises LinkError."""
        self.slots[consumer].copy_(tensor)
        target = consumer.stage % self.world.size
        try:
            self.targets[target].send_number(self.numbers[consumer])
        except OSError as error:
            raise self.links.outgoing[target].explain_error(error) from None

    def receive(self, consumer: Action) -> Tensor:
        """Wait for a message and return its slot. Raises LinkError, and TimeoutError after launch.step_timeout."""
        number = self.numbers[consumer]
        if number not in self.full:
            self._wait_until_full(number, consumer)
        self.full.remove(number)
        return self.slots[consumer]

    def _wait_until_full(self, number: int, consumer: Action) -> None:
        source_stage = consumer.stage + (-1 if consumer.kind == "F" else 1)
        source = source_stage % self.world.size
        try:
            while number not in self.full:
                self.full.update(self.sources[source].receive_numbers())
        except BlockingIOError:
            raise TimeoutError(
                f"rank {self.world.rank} waited {self.world.timeout.total_seconds():g} s for rank {source}: no message "
                f"for the {consumer}; see its log, or raise launch.step_timeout"
            ) from None
        except (OSError, EOFError) as error:
            raise self.links.incoming[source].explain_error(error) from None
