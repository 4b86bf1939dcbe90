"""The executor: plays one process's list of actions, with point-to-point messages that overlap computing.

Messages follow from the schedule. All receives of a step are posted before its first action, in the
order in which their sender will send, and sends are never waited for until the step is over; so
transfers run beside the arithmetic, and the same order serves gloo (matched by tag) and nccl (matched
by order alone).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common import schedules
from common.clock import Clock, Stamp
from common.launch import World
from common.schedules import Action, Schedule, Span, local_stages
from configs.pipeline import Pipeline as Settings

Loss = Callable[[Tensor, Tensor], Tensor]
Message = tuple[Action, Tensor]  # what is sent, under the name of the action that consumes it
Marks = list[tuple[Action, Stamp, Stamp]]
HISTORY = 100  # steps whose time stamps are kept


@torch.no_grad()
def boundary_shapes(stages: Sequence[nn.Module], sample: Sequence[int], dtype: torch.dtype) -> list[torch.Size]:
    """The shape of one sample behind each stage.

    Found by sending one through, in eval mode, so that BatchNorm does not count it. (The meta device would
    compute nothing, but takes a second to import.)
    """
    shapes, value = [], torch.zeros(1, *sample, dtype=dtype)
    for stage in stages:
        value = stage.to(dtype).eval()(value)
        stage.train()
        shapes.append(value.shape[1:])
    return shapes


def begins_in_place(stage: nn.Module) -> bool:
    """Whether a stage's first layer writes into its input, which autograd allows on a copy only."""
    first = next((module for module in stage.modules() if not any(module.children())), None)
    return bool(getattr(first, "inplace", False))


class Pipeline:
    """One process's stages of a model, trained by a schedule.

    `stages` are all stages of the model; this process keeps and moves to its device those that
    `local_stages` gives it. `loss` must be a mean over samples: a microbatch then counts by its share
    of the batch, and gradients equal those of the whole batch. `sample` is the shape of one input.
    """

    def __init__(
        self,
        settings: Settings,
        stages: Sequence[nn.Sequential],
        loss: Loss,
        world: World,
        *,
        batch: int,
        sample: Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.settings, self.loss, self.world, self.dtype = settings, loss, world, dtype
        self.plan = self._plan()
        self.layers = [[name for name, _ in stage.named_children()] for stage in stages]
        self.count, self.microbatches = settings.stages, settings.microbatches
        self.size = batch // self.microbatches
        self.shapes = boundary_shapes(stages, sample, dtype)
        mine = local_stages(world.rank, world.size, self.count)
        self.local = {s: stages[s].to(world.device) for s in mine}
        self.has_first, self.has_last = 0 in self.local, self.count - 1 in self.local
        self.copied = {s for s in self.local if s and begins_in_place(self.local[s])}
        self.clock = Clock(world.device)
        if len(set(world.hosts)) > 1:
            dist.barrier()
            self.clock.start_now()  # hosts count from their own start: the same moment becomes everybody's zero
        self.history: deque[Marks] = deque(maxlen=HISTORY)
        self.sends: list[tuple[dist.Work, Tensor]] = []
        self.groups = self._channels()
        self._connect()
        self.buffers = self._buffers()
        self.saved: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.handed: dict[Action, Tensor] = {}

    def _plan(self) -> Schedule:
        return schedules.of(self.settings)

    @property
    def module(self) -> nn.ModuleList:
        """The local stages, for the optimizer."""
        return nn.ModuleList(self.local.values())

    def state_dict(self) -> dict[str, Tensor]:
        """The local stages' parameters and buffers under their names in the whole model."""
        return {name: value for stage in self.local.values() for name, value in stage.state_dict().items()}

    def train(self, mode: bool = True) -> None:
        for stage in self.local.values():
            stage.train(mode)

    # ---- one training step

    def step(self, x: Tensor | None, y: Tensor | None) -> Tensor | None:
        """Forward and backward of one batch; gradients are added to the parameters' `.grad`.

        The process with the first stage passes inputs `x`, the one with the last stage targets `y`.
        Returns the mean loss, not yet synchronised, on the process with the last stage, else None.
        """
        self.xs = self._pieces(x) if x is not None and self.has_first else ()
        self.ys = self._pieces(y) if y is not None and self.has_last else ()
        self.total: Tensor | None = None
        pending = {action: (self._post(action, value), value) for action, value in self.buffers}
        marks: Marks = []
        stamp = self.clock.stamp
        for action in self.plan[self.world.rank]:
            if action in pending:
                work, self.handed[action] = pending[action]
                work.wait()
            start = stamp()
            message = self._forward(action) if action.kind == "F" else self._backward(action)
            marks.append((action, start, stamp()))
            if message is not None:
                self._hand(*message)
        self._finish_sends()
        self.history.append(marks)
        return self.total

    def _pieces(self, batch: Tensor) -> tuple[Tensor, ...]:
        """The microbatches of a batch. A whole batch stays as it is: a view of it makes each operation on it slower."""
        return batch.chunk(self.microbatches) if self.microbatches > 1 else (batch,)

    def _forward(self, action: Action) -> Message | None:
        _, stage, m = action
        x = self.xs[m] if stage == 0 else self.handed.pop(action).detach().requires_grad_()
        out = self.local[stage](x.clone() if stage in self.copied else x)
        if stage == self.count - 1:
            out = self.loss(out, self.ys[m])
            if self.microbatches > 1:
                out = out / self.microbatches
            self.total = out.detach() if self.total is None else self.total + out.detach()
        self.saved[stage, m] = x, out
        return (Action("F", stage + 1, m), out.detach()) if stage < self.count - 1 else None

    def _backward(self, action: Action) -> Message | None:
        _, stage, m = action
        x, out = self.saved.pop((stage, m))
        gradient = self.handed.pop(action) if stage < self.count - 1 else None
        if out.requires_grad:  # not behind a first stage without parameters
            torch.autograd.backward(out, gradient)
        if stage == 0:
            return None
        return Action("B", stage - 1, m), torch.zeros_like(x) if x.grad is None else x.grad

    # ---- evaluation

    @torch.no_grad()
    def predict(self, x: Tensor | None, count: int) -> Tensor | None:
        """The model's output for `count` samples on the process with the last stage, else None.

        All processes call it, and a collective after the last call: a stage sends its output and goes on to the
        next batch while later stages work.
        """
        value = x
        for stage, module in self.local.items():
            here = Action("F", stage, self.microbatches)  # a number no training message has
            if stage and here in self.handed:
                value = self.handed.pop(here)
            elif stage:
                value = self._buffer(here, count)
                self._post(here, value).wait()
            value = module(value)
            if stage < self.count - 1:
                self._hand(here._replace(stage=stage + 1), value)
        while len(self.sends) > 8:
            self.sends.pop(0)[0].wait()
        return value if self.has_last else None

    # ---- messages: an activation or a gradient is named by the action that consumes it

    def _home(self, stage: int) -> int:
        return stage % self.world.size

    def _hand(self, consumer: Action, value: Tensor) -> None:
        """Give a tensor to the action that consumes it, here or in another process."""
        target = self._home(consumer.stage)
        if target == self.world.rank:
            self.handed[consumer] = value
            return
        value = value.contiguous()
        work = dist.isend(value, target, self.groups[self._channel(consumer)], self._tag(consumer))
        assert work is not None
        self.sends.append((work, value))  # the tensor must live until it is sent

    def _post(self, consumer: Action, value: Tensor) -> dist.Work:
        """Begin to receive what an action needs."""
        source = self._home(consumer.stage - 1 if consumer.kind == "F" else consumer.stage + 1)
        work = dist.irecv(value, source, self.groups[self._channel(consumer)], self._tag(consumer))
        assert work is not None
        return work

    def _finish_sends(self) -> None:
        for work, _ in self.sends:
            work.wait()
        self.sends.clear()

    def _tag(self, action: Action) -> int:
        return (action.stage * (self.microbatches + 1) + action.microbatch) * 2 + (action.kind == "F")

    def _channel(self, action: Action) -> tuple[str, bool]:
        """Messages of one direction: its kind, and whether it goes round the end of the ring of processes."""
        edge = action.stage if action.kind == "F" else action.stage + 1
        return action.kind, edge % self.world.size == 0

    def _channels(self) -> dict[tuple[str, bool], dist.ProcessGroup | None]:
        """A group for each direction on nccl, which matches by order alone; gloo needs only tags."""
        channels = [(kind, wraps) for kind in "FB" for wraps in (False, True)]
        if self.world.backend != "nccl" or self.world.size == 1:
            return dict.fromkeys(channels)
        return {channel: cast(dist.ProcessGroup, dist.new_group(timeout=self.world.timeout)) for channel in channels}

    def _connect(self) -> None:
        """Send a first message on every channel, one after the other in one order on all processes.

        nccl connects a pair at its first message and both sides must be at it; within a step they are not.
        """
        token, size = torch.zeros(1, device=self.world.device), self.world.size
        for (kind, wraps), group in self.groups.items():
            pairs = [(size - 1, 0)] if wraps else [(low, low + 1) for low in range(size - 1)]
            for low, high in pairs if size > 1 else []:
                source, target = (low, high) if kind == "F" else (high, low)
                if self.world.rank == source:
                    dist.send(token, target, group)
                elif self.world.rank == target:
                    dist.recv(token, source, group)

    def _buffer(self, action: Action, size: int) -> Tensor:
        shape = self.shapes[action.stage - 1 if action.kind == "F" else action.stage]
        return torch.empty(size, *shape, dtype=self.dtype, device=self.world.device)

    def _buffers(self) -> list[tuple[Action, Tensor]]:
        """What this process receives in a step, in the order in which each sender sends it, with its memory."""
        found = []
        for sender, actions in enumerate(self.plan):
            for kind, stage, m in actions:
                consumer = Action(kind, stage + 1 if kind == "F" else stage - 1, m)
                inside = 0 <= consumer.stage < self.count
                if inside and sender != self.world.rank == self._home(consumer.stage):
                    found.append((consumer, self._buffer(consumer, self.size)))
        return found

    def spans(self) -> list[list[Span]]:
        """The kept steps of this process, oldest first, with times in seconds."""
        seconds = self.clock.seconds
        return [[Span(a, seconds(s), seconds(e)) for a, s, e in step] for step in self.history]

    @property
    def last_rank(self) -> int:
        """The process with the last stage: it knows the loss."""
        return self._home(self.count - 1)
