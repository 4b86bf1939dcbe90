"""Messages between ranks of one host: each has its slot of the host's memory, in which its tensor stays.

What it buys: a twentieth of the latency of a gloo socket, which wakes two threads for each message, and no copy at the
reader. Memory and its doorbell are those of the links (common/distributed/transport/memory_links.py). All of it stays
behind `open_shared_memory`, which returns None where it cannot work; the messages then go through gloo.

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

from common.core.errors import Unreachable
from common.distributed.rendezvous import World
from common.distributed.transport.connecting import Links, connect_ranks
from common.distributed.transport.memory_links import MemoryStream, choose_polling_seconds
from common.pipeline.schedules import Action

ALIGN = 64  # bytes of a cache line, at which each slot begins
SLOTS = READY = 0  # name of the memory of a link, and tag of its one message, before which the memory is handed over


class Route(NamedTuple):
    """A message: the action that consumes it, the ranks that send and receive it, and its shape [n, ...]."""

    consumer: Action
    source: int
    target: int
    shape: torch.Size


def open_shared_memory(world: World, near: Sequence[Route], dtype: torch.dtype) -> SharedMemory | None:
    """Open the memory for messages between ranks of the same host; None if the host lacks it. All ranks call it."""
    if world.size == 1:
        return None
    name = world.broadcast(secrets.token_hex(8))
    opened: SharedMemory | None = None
    with contextlib.suppress(OSError, Unreachable):
        opened = SharedMemory(world, near, dtype, connect_ranks_of_host(world, name))
    if world.broadcast(all(world.gather(opened is not None))):
        return opened
    if opened:
        opened.links.close()
    return None


def connect_ranks_of_host(world: World, name: str) -> Links:
    """Connect the ranks of this host with each other, by their ranks in this world. Raises OSError, Unreachable."""
    members = [rank for rank in range(world.size) if world.hosts[rank] == world.hosts[world.rank]]
    assert world.store is not None
    store, group = world.store, f"pipeline-{name}-{members[0]}"
    seconds = world.timeout.total_seconds()
    links = connect_ranks(
        members.index(world.rank), len(members),
        lambda key, value: store.set(f"{group}/{key}", value), lambda key: store.get(f"{group}/{key}"),
        group=group, address="127.0.0.1", host=world.hosts[world.rank], spin=choose_polling_seconds(world.local_size),
        setup_timeout=seconds, timeout=seconds,
    )  # fmt: skip
    for link in (*links.outgoing.values(), *links.incoming.values()):
        link.peer = members[link.peer]
    return Links(
        {link.peer: link for link in links.outgoing.values()}, {link.peer: link for link in links.incoming.values()}
    )


def count_slot_bytes(route: Route, dtype: torch.dtype) -> int:
    """Return the bytes of a message's slot, a multiple of ALIGN."""
    return -(-route.shape.numel() * dtype.itemsize // ALIGN) * ALIGN


class SharedMemory:
    """The slots of this rank's messages, and the doorbells of the ranks that share them. Raises OSError, LinkError."""

    def __init__(self, world: World, near: Sequence[Route], dtype: torch.dtype, links: Links) -> None:
        self.world, self.links = world, links
        self.slots: dict[Action, Tensor] = {}
        self.numbers = {route.consumer: number for number, route in enumerate(near)}
        self.full: set[int] = set()
        self.targets: dict[int, MemoryStream] = {}
        self.sources: dict[int, MemoryStream] = {}
        for peer, link in links.outgoing.items():
            stream, memory = link.stream, None
            routes = [route for route in near if (route.source, route.target) == (world.rank, peer)]
            if isinstance(stream, MemoryStream):
                with contextlib.suppress(OSError):
                    memory = stream.share_memory(
                        SLOTS, max(ALIGN, sum(count_slot_bytes(route, dtype) for route in routes))
                    )
                    self.targets[peer] = stream
                    self._map_slots(memory, routes, dtype)
            link.send(READY, bytes([memory is not None]))
        for peer, incoming in links.incoming.items():
            stream, answer = incoming.stream, bytearray(1)
            routes = [route for route in near if (route.source, route.target) == (peer, world.rank)]
            incoming.receive(READY, answer)
            if answer[0] and isinstance(stream, MemoryStream):
                self.sources[peer] = stream
                self._map_slots(stream.shared[SLOTS], routes, dtype)
        if len(self.targets) < len(links.outgoing) or len(self.sources) < len(links.incoming):
            links.close()
            raise OSError("this host has no memory left for messages")

    def _map_slots(self, memory: mmap.mmap, routes: Sequence[Route], dtype: torch.dtype) -> None:
        start = 0
        for route in routes:  # no slot is a view of another: autograd takes a write to one view as a write to all
            slot = torch.frombuffer(memory, dtype=dtype, count=route.shape.numel(), offset=start)
            self.slots[route.consumer] = slot.view(route.shape)
            start += count_slot_bytes(route, dtype)

    def send(self, consumer: Action, value: Tensor) -> None:
        """Copy a tensor to its slot and notify the rank that consumes it. Raises LinkError."""
        self.slots[consumer].copy_(value)
        target = consumer.stage % self.world.size
        try:
            self.targets[target].send_number(self.numbers[consumer])
        except OSError as error:
            raise self.links.outgoing[target].explain(error) from None

    def receive(self, consumer: Action) -> Tensor:
        """Wait for a message and return its slot. Raises LinkError, and TimeoutError after launch.step_timeout."""
        number = self.numbers[consumer]
        if number not in self.full:
            self._wait(number, consumer)
        self.full.remove(number)
        return self.slots[consumer]

    def _wait(self, number: int, consumer: Action) -> None:
        source = (consumer.stage + (-1 if consumer.kind == "F" else 1)) % self.world.size
        try:
            while number not in self.full:
                self.full.update(self.sources[source].receive_numbers())
        except BlockingIOError:
            raise TimeoutError(
                f"rank {self.world.rank} waited {self.world.timeout.total_seconds():g} s for rank {source}: nothing "
                f"came for the {consumer}; see its log, or raise launch.step_timeout"
            ) from None
        except (OSError, EOFError) as error:
            raise self.links.incoming[source].explain(error) from None
