"""Execution of one rank's actions of a schedule, with messages that overlap computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.distributed.rendezvous import World
from common.measure.device_clock import HISTORY, DeviceClock, Stamp
from common.pipeline import schedules
from common.pipeline.p2p import Messages, list_routes
from common.pipeline.schedules import Action, Span, list_local_stages
from configs.pipeline import PipelineConfig

Loss = Callable[[Tensor, Tensor], Tensor]
Message = tuple[Action, Tensor]  # what is sent, under the name of the action that consumes it
Marks = list[tuple[Action, Stamp, Stamp]]


@torch.no_grad()
def infer_boundary_shapes(stages: Sequence[nn.Module], sample: Sequence[int], dtype: torch.dtype) -> list[torch.Size]:
    """Return the shape of one sample after each stage, without N; `sample` is that of one input.

    Sends a sample of zeros through the stages in eval mode, so that BatchNorm's statistics stay. (The meta device
    would compute nothing, but takes a second to import.)
    """
    shapes, value = [], torch.zeros(1, *sample, dtype=dtype)
    for stage in stages:
        value = stage.to(dtype).eval()(value)
        stage.train()
        shapes.append(value.shape[1:])
    return shapes


class PipelineEngine:
    """The built-in engine: one rank's stages of a model, trained by a schedule.

    `stages` are all stages of the model; the rank moves those that `list_local_stages` gives it to its device. `loss`
    must be a mean over samples: divided by the number of microbatches, the gradients equal those of the whole batch.
    `batch` is the number of samples in a step of this pipeline, `sample` the shape of one input without N.
    """

    def __init__(
        self,
        settings: PipelineConfig,
        stages: Sequence[nn.Sequential],
        loss: Loss,
        world: World,
        *,
        batch: int,
        sample: Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.settings, self.loss, self.world, self.dtype = settings, loss, world, dtype
        self.plan = schedules.make_schedule(settings)
        self.layers = [[name for name, _ in stage.named_children()] for stage in stages]
        self.count, self.microbatches = settings.stages, settings.microbatches
        self.size = batch // self.microbatches
        self.shapes = infer_boundary_shapes(stages, sample, dtype)
        mine = list_local_stages(world.rank, world.size, self.count)
        self.local = {s: stages[s].to(world.device) for s in mine}
        self.has_first, self.has_last = 0 in self.local, self.count - 1 in self.local
        self.clock = DeviceClock(world.device)
        if len(set(world.hosts)) > 1:
            dist.barrier(world.group)  # not the world's: other replicas may be on one host
            self.clock.set_zero_now()  # hosts have unrelated clocks: all count from the end of the barrier
        self.history: deque[Marks] = deque(maxlen=HISTORY)
        routes = list_routes(self.plan, self.shapes, self.size)
        self.messages = Messages(world, routes, dtype, self.microbatches, settings.transport)
        self.saved: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    @property
    def module(self) -> nn.ModuleList:
        """The local stages, such as for the optimizer."""
        return nn.ModuleList(self.local.values())

    # ---- one training step

    def step(self, x: Tensor | None, y: Tensor | None) -> Tensor | None:
        """Forward and backward of one batch; gradients are added to the parameters' `.grad`.

        The rank with the first stage passes inputs x [batch, ...], the one with the last stage targets y [batch].
        Returns the mean loss, a 0-d tensor that the device may still be computing, on the rank with the last stage,
        else None. Raises TimeoutError if a message does not arrive in time.
        """
        self.clock.begin_step()
        self.xs = self._split_batch(x) if x is not None and self.has_first else ()
        self.ys = self._split_batch(y) if y is not None and self.has_last else ()
        self.total: Tensor | None = None
        marks: Marks = []
        stamp, messages, last = self.clock.stamp, self.messages, self.count - 1
        messages.post_receives()
        for action in self.plan[self.world.rank]:
            kind, stage, _ = action
            # the first forward and the last backward receive no message
            given = messages.receive(action) if stage != (0 if kind == "F" else last) else None
            start = stamp()
            made = self._forward(action, given) if kind == "F" else self._backward(action, given)
            marks.append((action, start, stamp()))
            if made is not None:
                messages.send(*made)
        messages.wait_until_sent()
        self.history.append(marks)
        return self.total

    def _split_batch(self, batch: Tensor) -> tuple[Tensor, ...]:
        """Return the microbatches of a batch; a single one is the batch itself: operations on a view are slower.

        Their size is that of `configs.batch_plan`. `Loader` makes those whose gradients are accumulated.
        """
        return batch.chunk(self.microbatches) if self.microbatches > 1 else (batch,)

    def _forward(self, action: Action, given: Tensor | None) -> Message | None:
        _, stage, m = action
        x = self.xs[m] if given is None else given.detach().requires_grad_()
        out = self.local[stage](x)
        if stage == self.count - 1:
            out = self.loss(out, self.ys[m])
            if self.microbatches > 1:
                out = out / self.microbatches
            self.total = out.detach() if self.total is None else self.total + out.detach()
        self.saved[stage, m] = x, out
        return (Action("F", stage + 1, m), out.detach()) if stage < self.count - 1 else None

    def _backward(self, action: Action, gradient: Tensor | None) -> Message | None:
        _, stage, m = action
        x, out = self.saved.pop((stage, m))
        if out.requires_grad:  # false after a first stage without parameters
            torch.autograd.backward(out, gradient)
        if stage == 0:
            return None
        return Action("B", stage - 1, m), torch.zeros_like(x) if x.grad is None else x.grad

    # ---- evaluation

    @torch.no_grad()
    def predict(self, x: Tensor | None, count: int) -> Tensor | None:
        """Return the model's output [count, ...] for inputs x on the rank with the last stage, else None.

        All ranks call it, and a collective after the last call: a stage sends its output and continues with the next
        batch while later stages work.
        """
        if not count:  # the shard of a replica may be empty
            return None
        network, apart = self.messages.network, self.world.size > 1
        value = x
        for stage, module in self.local.items():
            here = Action("F", stage, self.microbatches)  # a number that no training message has
            if stage and apart:
                value = torch.empty(count, *self.shapes[stage - 1], dtype=self.dtype, device=self.world.device)
                network.receive(here, value).wait()
            value = module(value)
            if stage < self.count - 1 and apart:
                network.send(here._replace(stage=stage + 1), value)
        network.wait_for_sends(left=8)
        return value if self.has_last else None

    def collect_spans(self) -> list[list[Span]]:
        """Return this rank's newest steps, oldest first, with times in seconds."""
        seconds = self.clock.to_seconds
        return [[Span(a, seconds(s), seconds(e)) for a, s, e in step] for step in self.history]

    @property
    def last_rank(self) -> int:
        """The rank that holds the last stage in the first replica, and so the loss."""
        return (self.count - 1) % self.world.size
