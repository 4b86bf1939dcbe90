"""Point-to-point messages of a pipeline: through shared memory within a host, else through the network.

A message is named by the action that consumes it: the forward of a later stage gets an activation, the backward of an
earlier one a gradient. The messages, and the order in which each rank sends them, follow from the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.rendezvous import World
from common.pipeline.schedules import Action, Schedule
from common.pipeline.shared_memory import Route, SharedMemory, open_shared_memory


def list_routes(plan: Schedule, shapes: Sequence[torch.Size], size: int) -> list[Route]:
    """Return all messages between ranks in a step, in the order in which each rank sends them.

    `shapes` are those of one sample after each stage, `size` is the number of samples in a microbatch.
    """
    routes = []
    for source, actions in enumerate(plan):
        for kind, stage, m in actions:
            consumer = Action(kind, stage + 1 if kind == "F" else stage - 1, m)
            target = consumer.stage % len(plan)
            if 0 <= consumer.stage < len(shapes) and target != source:
                edge = min(stage, consumer.stage)
                routes.append(Route(consumer, source, target, torch.Size((size, *shapes[edge]))))
    return routes


class Messages:
    """One rank's messages of a step: `post_receives`, `receive` and `send` as the schedule says, `wait_until_sent`.

    All receives from the network are posted at the beginning, and sends are waited for at the end only: messages
    overlap computation.
    """

    def __init__(
        self, world: World, routes: Sequence[Route], dtype: torch.dtype, microbatches: int, transport: str
    ) -> None:
        self.world = world
        self.network = Network(world, microbatches)
        self.memory: SharedMemory | None = None
        near = [route for route in routes if world.hosts[route.source] == world.hosts[route.target]]
        if transport == "auto" and world.device.type == "cpu":
            self.memory = open_shared_memory(world, near, dtype)
        self.near = frozenset(route.consumer for route in near if self.memory)
        self.buffers = [
            (route.consumer, torch.empty(route.shape, dtype=dtype, device=world.device))
            for route in routes
            if route.target == world.rank and route.consumer not in self.near
        ]
        self.coming: dict[Action, tuple[dist.Work, Tensor]] = {}
        self.inside: dict[Action, Tensor] = {}

    def post_receives(self) -> None:
        """Post all receives of a step."""
        self.coming = {action: (self.network.receive(action, value), value) for action, value in self.buffers}

    def send(self, consumer: Action, value: Tensor) -> None:
        """Send a tensor (activation or gradient of a microbatch) to the action that consumes it."""
        if consumer.stage % self.world.size == self.world.rank:
            self.inside[consumer] = value
        elif self.memory and consumer in self.near:
            self.memory.send(consumer, value)
        else:
            self.network.send(consumer, value)

    def receive(self, consumer: Action) -> Tensor:
        """Wait for the tensor that an action consumes. It is valid until the next step begins."""
        if consumer in self.inside:
            return self.inside.pop(consumer)
        if self.memory and consumer in self.near:
            return self.memory.receive(consumer)
        work, value = self.coming.pop(consumer)
        work.wait()
        return value

    def wait_until_sent(self) -> None:
        """Wait until all tensors of the step are sent."""
        self.network.wait_for_sends()


class Network:
    """Point-to-point messages of torch.distributed: gloo matches them by tag, nccl only by their order."""

    def __init__(self, world: World, microbatches: int) -> None:
        self.world, self.microbatches = world, microbatches
        self.sends: list[tuple[dist.Work, Tensor]] = []
        self.groups = self._make_groups()
        self._connect()

    def send(self, consumer: Action, value: Tensor) -> None:
        """Begin to send a tensor to the action that consumes it."""
        value = value.contiguous()
        target = self.world.global_rank(consumer.stage % self.world.size)
        work = dist.isend(value, target, self.groups.get(self._find_channel(consumer)), self._make_tag(consumer))
        assert work is not None
        self.sends.append((work, value))  # the tensor must live until it is sent

    def receive(self, consumer: Action, value: Tensor) -> dist.Work:
        """Begin to receive the tensor that an action consumes, into `value`."""
        source = (consumer.stage - 1 if consumer.kind == "F" else consumer.stage + 1) % self.world.size
        group, tag = self.groups.get(self._find_channel(consumer)), self._make_tag(consumer)
        work = dist.irecv(value, self.world.global_rank(source), group, tag)
        assert work is not None
        return work

    def wait_for_sends(self, left: int = 0) -> None:
        """Wait until at most `left` tensors are still to be sent."""
        while len(self.sends) > left:
            self.sends.pop(0)[0].wait()

    def _make_tag(self, consumer: Action) -> int:
        """Return a unique tag of a message; each stage has one microbatch number more, for evaluation."""
        return (consumer.stage * (self.microbatches + 1) + consumer.microbatch) * 2 + (consumer.kind == "F")

    def _find_channel(self, consumer: Action) -> tuple[str, bool]:
        """Return (kind, wraps) of a message: wraps is true between the last and the first rank.

        With several stages a rank, stage p follows stage p - 1 around the ring of p ranks.
        """
        later = consumer.stage if consumer.kind == "F" else consumer.stage + 1
        return consumer.kind, later % self.world.size == 0

    def _make_groups(self) -> dict[tuple[str, bool], dist.ProcessGroup]:
        """Return a process group for each direction on nccl; gloo needs none."""
        if self.world.backend != "nccl" or self.world.size == 1:
            return {}
        channels = [(kind, wraps) for kind in "FB" for wraps in (False, True)]
        members = [self.world.global_rank(rank) for rank in range(self.world.size)]
        alone = bool(self.world.global_ranks)  # the members of a subgroup make it without the other ranks
        groups = (dist.new_group(members, self.world.timeout, use_local_synchronization=alone) for _ in channels)
        return {channel: cast(dist.ProcessGroup, group) for channel, group in zip(channels, groups, strict=True)}

    def _connect(self) -> None:
        """Send a first message in every direction on nccl, in the same order on all ranks.

        nccl connects a pair at its first message, in which both sides must take part; within a step they do not.
        """
        token, size = torch.zeros(1, device=self.world.device), self.world.size
        for (kind, wraps), group in self.groups.items():
            pairs = [(size - 1, 0)] if wraps else [(low, low + 1) for low in range(size - 1)]
            for low, high in pairs:
                source, target = (low, high) if kind == "F" else (high, low)
                if self.world.rank == source:
                    dist.send(token, self.world.global_rank(target), group)
                elif self.world.rank == target:
                    dist.recv(token, self.world.global_rank(source), group)
