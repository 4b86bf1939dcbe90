"""Point-to-point messages of a pipeline, sent through shared memory within a host and through the network otherwise.

A message is identified by the action that consumes it. An activation is consumed by the forward of the next stage, and
a gradient is consumed by the backward of the previous stage. The schedule determines all messages and the order in
which each rank sends them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from common.ranks.rendezvous import World
from common.techniques.pipeline.schedules import Action, Schedule, list_stage_ranks
from common.techniques.pipeline.shared_memory import MessageRoute, SharedMemoryMessages, open_shared_memory


def list_routes(plan: Schedule, shapes: Sequence[torch.Size], size: int) -> list[MessageRoute]:
    """Return the routes of all messages between ranks in a step, in the order in which each rank sends them.

    `shapes` contains the shape of one sample after each stage. `size` is the number of samples in a microbatch.
    """
    routes = []
    stage_ranks = list_stage_ranks(plan)
    split_backwards = {(action.stage, action.microbatch) for action in chain(*plan) if action.kind == "I"}
    for source, actions in enumerate(plan):
        for action in actions:
            kind, stage, microbatch = action.awaited
            consumer = Action(kind, stage + 1 if kind == "F" else stage - 1, microbatch)
            if kind == "W" or consumer.stage not in range(len(shapes)):
                continue
            target = stage_ranks[consumer.stage]
            if target != source:
                boundary = min(stage, consumer.stage)
                shape = torch.Size((size, *shapes[boundary]))
                is_kept = kind == "F" and (consumer.stage, microbatch) in split_backwards
                routes.append(MessageRoute(consumer, source, target, shape, is_kept))
    return routes


class StageMessages:
    """Messages that one rank sends and receives in a step.

    In each step, call `post_receives` first, then `receive` and `send`, and finally `wait_until_sent`. With gloo, all
    receives from the network are posted at the start of a step, and the rank waits for its sends only at the end.
    Messages therefore overlap computation. With nccl, a receive is posted when its tensor is needed.
    """

    def __init__(
        self,
        world: World,
        routes: Sequence[MessageRoute],
        stage_ranks: Sequence[int],
        dtype: torch.dtype,
        microbatches: int,
        transport: str,
    ) -> None:
        self.world = world
        self.stage_ranks = stage_ranks
        self.network = NetworkMessages(world, stage_ranks, microbatches)
        self.memory: SharedMemoryMessages | None = None
        local_routes = [route for route in routes if world.hosts[route.source] == world.hosts[route.target]]
        if transport == "auto" and world.device.type == "cpu":
            self.memory = open_shared_memory(world, local_routes, dtype)
        self.in_memory = frozenset(route.consumer for route in local_routes if self.memory)
        self.shared_memory_bytes = 0
        """Bytes that this rank sends through shared memory in each step."""
        for route in local_routes:
            if self.memory and route.source == world.rank:
                self.shared_memory_bytes += route.shape.numel() * dtype.itemsize
        self.buffers: dict[Action, Tensor] = {}
        """Buffers of the messages from the network, in the order in which each rank sends its messages."""
        for route in routes:
            if route.target == world.rank and route.consumer not in self.in_memory:
                self.buffers[route.consumer] = torch.empty(route.shape, dtype=dtype, device=world.device)
        self.expected: dict[Action, Tensor] = {}
        """Buffers of the messages of the current step, which may have fewer microbatches."""
        self.receives: dict[Action, dist.Work] = {}
        """Posted receives of the current step."""
        self.within_rank: dict[Action, Tensor] = {}

    def post_receives(self, count: int) -> None:
        """Start a step with `count` microbatches. With gloo, post all receives from the network.

        A receive of nccl is a kernel that runs until the message arrives. Some calls of CUDA wait for running kernels,
        for example to load a kernel (CUDA C++ Programming Guide, "Lazy Loading"). In a forward pass for whose output
        the sender of the message waits, such a call never returns. With nccl, a rank therefore posts a receive only
        when it needs the tensor.
        """
        self.expected = {action: buffer for action, buffer in self.buffers.items() if action.microbatch < count}
        posted = {} if self.world.backend == "nccl" else self.expected
        self.receives = {action: self.network.receive(action, buffer) for action, buffer in posted.items()}

    def _post_receives_until(self, consumer: Action) -> None:
        """Post the receive of a message, and before it those of all earlier messages of its kind from the same rank.

        nccl matches these messages by their order.
        """
        find_ranks = self.network.find_ranks
        for action, buffer in self.expected.items():
            is_in_order = action.kind == consumer.kind and find_ranks(action) == find_ranks(consumer)
            if is_in_order and action not in self.receives:
                self.receives[action] = self.network.receive(action, buffer)
            if action == consumer:
                return

    def send(self, consumer: Action, tensor: Tensor) -> None:
        """Send a tensor (activation or gradient of a microbatch) to the rank of the action that consumes the tensor."""
        if self.stage_ranks[consumer.stage] == self.world.rank:
            self.within_rank[consumer] = tensor
        elif self.memory and consumer in self.in_memory:
            self.memory.send(consumer, tensor)
        else:
            self.network.send(consumer, tensor)

    def receive(self, consumer: Action) -> Tensor:
        """Wait for the tensor that an action consumes, and return the tensor, which is valid until the next step."""
        if consumer in self.within_rank:
            return self.within_rank.pop(consumer)
        if self.memory and consumer in self.in_memory:
            return self.memory.receive(consumer)
        if consumer not in self.receives:
            self._post_receives_until(consumer)
        self.receives[consumer].wait()
        return self.buffers[consumer]

    def wait_until_sent(self) -> None:
        """Wait until all tensors of the step have been sent."""
        self.network.wait_for_sends()


class NetworkMessages:
    """Point-to-point messages through torch.distributed.

    gloo matches sends with receives by their tags. nccl ignores tags and matches sends with receives by their order.
    Two ranks exchange up to four sequences of messages: activations and gradients, each in both directions if a rank
    has several stages. nccl therefore needs a process group for each kind and direction.
    """

    def __init__(self, world: World, stage_ranks: Sequence[int], microbatches: int) -> None:
        self.world = world
        self.stage_ranks = stage_ranks
        self.microbatches = microbatches
        self.sends: list[tuple[dist.Work, Tensor]] = []
        self.groups = self._create_process_groups()
        self._connect_rank_pairs()

    def send(self, consumer: Action, tensor: Tensor) -> None:
        """Start sending a tensor to the action that consumes it."""
        tensor = tensor.contiguous()
        source, target = self.find_ranks(consumer)
        group = self.groups.get((consumer.kind, source < target))
        work = dist.isend(tensor, self.world.get_global_rank(target), group, self._make_tag(consumer))
        assert work is not None
        self.sends.append((work, tensor))  # keeps the tensor alive until it is sent

    def receive(self, consumer: Action, buffer: Tensor) -> dist.Work:
        """Start receiving the tensor that an action consumes into `buffer`."""
        source, target = self.find_ranks(consumer)
        group = self.groups.get((consumer.kind, source < target))
        work = dist.irecv(buffer, self.world.get_global_rank(source), group, self._make_tag(consumer))
        assert work is not None
        return work

    def wait_for_sends(self, max_pending: int = 0) -> None:
        """Wait until at most `max_pending` tensors remain to be sent."""
        while len(self.sends) > max_pending:
            self.sends.pop(0)[0].wait()

    def _make_tag(self, consumer: Action) -> int:
        """Return a unique tag for a message.

        The messages of an evaluation use one additional microbatch number per stage.
        """
        number = consumer.stage * (self.microbatches + 1) + consumer.microbatch
        return 2 * number + 1 if consumer.kind == "F" else 2 * number

    def find_ranks(self, consumer: Action) -> tuple[int, int]:
        """Return the source and the target rank of a message."""
        source_stage = consumer.stage - 1 if consumer.kind == "F" else consumer.stage + 1
        return self.stage_ranks[source_stage], self.stage_ranks[consumer.stage]

    def _create_process_groups(self) -> dict[tuple[str, bool], dist.ProcessGroup]:
        """Create a process group for each kind of messages and for descending and ascending ranks, if nccl is used.

        Return an empty dict for gloo, which needs no such groups.
        """
        if self.world.backend != "nccl" or self.world.size == 1:
            return {}
        members = list(map(self.world.get_global_rank, range(self.world.size)))
        is_subgroup = bool(self.world.global_ranks)  # ranks outside the subgroup do not call new_group
        groups = {}
        for kind in "FB":
            for is_ascending in (False, True):
                group = dist.new_group(members, self.world.timeout, use_local_synchronization=is_subgroup)
                groups[kind, is_ascending] = cast(dist.ProcessGroup, group)
        return groups

    def _connect_rank_pairs(self) -> None:
        """Send a first message between each pair of ranks with nccl, in the same order on all ranks.

        nccl connects two ranks when they exchange their first message, and both ranks must call nccl at the same time.
        Within a training step, the two ranks would call nccl at different times.
        """
        token = torch.zeros(1, device=self.world.device)
        pairs = dict.fromkeys(pairwise(self.stage_ranks))  # sources and targets of forwards, each pair once
        for (kind, is_ascending), group in self.groups.items():
            for pair in pairs:
                source, target = pair if kind == "F" else reversed(pair)
                if source == target or (source < target) != is_ascending:
                    continue
                if self.world.rank == source:
                    dist.send(token, self.world.get_global_rank(target), group)
                elif self.world.rank == target:
                    dist.recv(token, self.world.get_global_rank(source), group)
