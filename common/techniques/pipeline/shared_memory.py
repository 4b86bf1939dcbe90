"""Messages between ranks on the same host, each in a separate slot of shared memory.

The latency of such a message is one twentieth of the latency of a gloo message, which wakes two threads. Usually, the
reader does not copy the message. Links (common/ranks/links) provide the memory and the notifications. The entry point
of this module is `open_shared_memory`. If `open_shared_memory` returns None, shared memory cannot be used, and messages
are sent through gloo.

A slot is reused in the next step, when the reader no longer needs the message in this slot. The sender of an activation
continues only after it has received the gradient that is computed from this activation. The sender of a gradient
continues only after it has received the next activation. If a backward is split, the gradient of the input is sent
before the gradients of the weights are computed, which also need the activation. Such an activation is copied.
"""

from __future__ import annotations

import contextlib
import mmap
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from common.ranks.links.connecting import RankLinks, connect_ranks
from common.ranks.links.memory_stream import MemoryStream, choose_polling_seconds
from common.ranks.rendezvous import World
from common.system.errors import RankTimeoutError, UnreachableError
from common.techniques.pipeline.schedules import Action

SLOT_ALIGNMENT_BYTES = 64  # size of a cache line
SLOT_MEMORY_NAME = 0  # name of the memory that a link passes to the other rank
READY_TAG = 0  # tag of the only message of a link, which follows the memory


class MessageRoute(NamedTuple):
    """A message: the action that consumes it, its source and target ranks, and its shape [n, ...]."""

    consumer: Action
    source: int
    target: int
    shape: torch.Size
    is_kept: bool = False
    """True if the target still needs the message after it has sent a message that is computed from it."""


def open_shared_memory(world: World, routes: Sequence[MessageRoute], dtype: torch.dtype) -> SharedMemoryMessages | None:
    """Open the shared memory for messages within hosts. All ranks must call this function.

    Return None on all ranks if any rank cannot open the memory, or with launch.transport=network.
    """
    if world.size == 1:
        return None
    name = world.broadcast(secrets.token_hex(8))
    memory: SharedMemoryMessages | None = None
    # The built-in backend knows the name of this rank's host only if its ranks may share memory.
    if world.transport is None or world.transport.host:
        with contextlib.suppress(OSError, UnreachableError):
            memory = SharedMemoryMessages(world, routes, dtype, connect_ranks_of_host(world, name))
    if world.broadcast(all(world.gather(memory is not None))):
        return memory
    if memory:
        memory.links.close()
    return None


def connect_ranks_of_host(world: World, name: str) -> RankLinks:
    """Connect all ranks on this host with each other, and return the links of this rank.

    The keys of the returned links are ranks in `world`. Raises OSError or UnreachableError.
    """
    host = world.hosts[world.rank]
    members = [rank for rank in range(world.size) if world.hosts[rank] == host]
    assert world.store is not None
    store = world.store
    group = f"pipeline-{name}-{members[0]}"
    timeout = world.timeout.total_seconds()
    return connect_ranks(
        members.index(world.rank), len(members),
        lambda key, value: store.set(f"{group}/{key}", value), lambda key: store.get(f"{group}/{key}"),
        group=group, address="127.0.0.1", host=host, polling_seconds=choose_polling_seconds(world.local_size),
        setup_timeout=timeout, timeout=timeout, names=members,
    )  # fmt: skip


def count_slot_bytes(route: MessageRoute, dtype: torch.dtype) -> int:
    """Return the size of the slot of a message in bytes, a multiple of SLOT_ALIGNMENT_BYTES."""
    nbytes = route.shape.numel() * dtype.itemsize
    return -(-nbytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


class SharedMemoryMessages:
    """Slots for the messages of this rank, and links that notify the readers of the messages.

    The constructor raises OSError or LinkError.
    """

    def __init__(self, world: World, routes: Sequence[MessageRoute], dtype: torch.dtype, links: RankLinks) -> None:
        self.world = world
        self.links = links
        self.dtype = dtype
        self.slots: dict[Action, Tensor] = {}
        self.numbers = {route.consumer: number for number, route in enumerate(routes)}
        self.routes = {route.consumer: route for route in routes}
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
            raise OSError("cannot allocate shared memory for messages on this host")

    def _map_slots(self, memory: mmap.mmap, routes: Sequence[MessageRoute]) -> None:
        start = 0
        for route in routes:  # separate tensors, because autograd treats a write to one view as a write to all views
            slot = torch.frombuffer(memory, dtype=self.dtype, count=route.shape.numel(), offset=start)
            self.slots[route.consumer] = slot.view(route.shape)
            start += count_slot_bytes(route, self.dtype)

    def send(self, consumer: Action, tensor: Tensor) -> None:
        """Copy a tensor to its slot and notify the rank that consumes the tensor. Raises LinkError."""
        self.slots[consumer].copy_(tensor)
        target = self.routes[consumer].target
        try:
            self.targets[target].send_number(self.numbers[consumer])
        except OSError as error:
            raise self.links.outgoing[target].explain_error(error) from None

    def receive(self, consumer: Action) -> Tensor:
        """Wait for a message and return its slot, or a copy if the message is kept.

        Raises LinkError, or RankTimeoutError after launch.step_timeout seconds.
        """
        number = self.numbers[consumer]
        if number not in self.full:
            self._wait_until_full(number, consumer)
        self.full.remove(number)
        slot = self.slots[consumer]
        return slot.clone() if self.routes[consumer].is_kept else slot

    def _wait_until_full(self, number: int, consumer: Action) -> None:
        source = self.routes[consumer].source
        try:
            while number not in self.full:
                self.full.update(self.sources[source].receive_numbers())
        except BlockingIOError:
            seconds = self.world.timeout.total_seconds()
            raise RankTimeoutError(
                f"rank {self.world.rank} received no message from rank {source} for the {consumer} within {seconds:g} "
                f"s; see the log of rank {source}, or raise launch.step_timeout"
            ) from None
        except (OSError, EOFError) as error:
            raise self.links.incoming[source].explain_error(error) from None
