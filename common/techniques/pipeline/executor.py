"""Built-in pipeline engine, which executes the actions of one rank and overlaps messages with computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.measure.device_clock import MAX_STAMPED_STEPS, DeviceClock, Stamp
from common.models.sample_dropout import list_dropout_layers
from common.ranks.rendezvous import World
from common.techniques.pipeline import schedules
from common.techniques.pipeline.schedules import Action, Schedule, Span
from common.techniques.pipeline.stage_messages import StageMessages, list_routes
from configs.pipeline import PipelineConfig

if TYPE_CHECKING:
    from common.techniques.pipeline.split_backward import WeightGradients

LossFunction = Callable[[Tensor, Tensor], Tensor]
Message = tuple[Action, Tensor]  # a tensor and the action that consumes the tensor
Marks = list[tuple[Action, Stamp, Stamp]]


@torch.no_grad()
def infer_boundary_shapes(stages: Sequence[nn.Module], sample: Tensor, dtype: torch.dtype) -> list[torch.Size]:
    """Return the shape of one sample after each stage, without the batch dimension.

    `sample` [1, ...] is one input. It passes through the stages, which are in eval mode so that the statistics of
    BatchNorm do not change. Tensors on the meta device would avoid this computation, but the first use of this device
    takes a second.
    """
    shapes = []
    activation = sample
    for stage in stages:
        activation = stage.to(dtype).eval()(activation)
        stage.train()
        shapes.append(activation.shape[1:])
    return shapes


class ScheduleExecutor:
    """Executes the actions of one rank in the order of a schedule.

    `plan` is the schedule of all ranks. `stages` contains the stages of this rank by number, on the rank's device.
    `shapes` contains the shape of one sample after each stage of the model, without the batch dimension. `size` is the
    number of samples in a microbatch, and `dtype` is the data type of activations between stages.
    """

    layers: Sequence[Sequence[str]] = ()
    """Names of the layers of each stage of the model, for reports."""

    def __init__(
        self,
        plan: Schedule,
        stages: Mapping[int, nn.Sequential],
        shapes: Sequence[torch.Size],
        world: World,
        *,
        microbatches: int,
        size: int,
        dtype: torch.dtype,
        transport: str = "auto",
    ) -> None:
        self.plan = plan
        self.local_stages = stages
        self.shapes = shapes
        self.world = world
        self.dtype = dtype
        self.stage_count = len(shapes)
        self.microbatches = microbatches
        self.count = microbatches
        """Number of microbatches of the current step."""
        self.microbatch_size = size
        self.stage_ranks = schedules.list_stage_ranks(plan)
        actions = plan[world.rank]
        self.split_backwards = {(stage, microbatch) for kind, stage, microbatch in actions if kind == "I"}
        self.has_first_stage = 0 in stages
        self.has_last_stage = self.stage_count - 1 in stages
        self.clock = DeviceClock(world.device)
        if len(set(world.hosts)) > 1:
            dist.barrier(world.group)  # of this group only, because other replicas may be on a single host
            self.clock.set_origin_now()  # clocks of different hosts are unrelated, so time starts after the barrier
        self.dropout_layers = {number: list_dropout_layers([stage]) for number, stage in stages.items()}
        self.history: deque[Marks] = deque(maxlen=MAX_STAMPED_STEPS)
        routes = list_routes(plan, shapes, size)
        self.messages = StageMessages(world, routes, self.stage_ranks, dtype, microbatches, transport)
        self.saved: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.weight_gradients: dict[tuple[int, int], Sequence[WeightGradients]] = {}

    def compute_stage(self, stage: int, x: Tensor) -> Tensor:
        """Return the output of a stage of this rank."""
        output: Tensor = self.local_stages[stage](x)
        return output

    def prepare_backward(self, stage: int) -> None:
        """Act before each backward of a stage of this rank. This base class does nothing."""

    # ---- one training step

    def execute(
        self, inputs: Sequence[Tensor], targets: Sequence[Tensor], compute_loss: LossFunction, count: int
    ) -> Tensor | None:
        """Run forward and backward for one batch, and add the gradients to the parameters' `.grad`.

        `inputs` contains the input of each microbatch on the rank with the first stage, and `targets` its targets on
        the rank with the last stage. `compute_loss` maps the outputs and targets of a microbatch to a loss. `count` is
        the number of microbatches; it may be smaller than that of the schedule. The rank with the last stage returns
        the sum of the losses, a 0-d tensor whose value the device may still be computing. All other ranks return None.
        Raises RankTimeoutError if a message does not arrive in time.
        """
        self.clock.refresh_reference_event()
        self.inputs = inputs
        self.targets = targets
        self.compute_loss = compute_loss
        self.count = count
        self.total_loss: Tensor | None = None
        marks: Marks = []
        stamp = self.clock.stamp
        messages = self.messages
        last_stage = self.stage_count - 1
        messages.post_receives(count)
        for action in self.plan[self.world.rank]:
            kind, stage, microbatch = action
            if microbatch >= count:
                continue
            is_forward = kind == "F"
            # the forward of the first stage and the backward of the last stage receive no message
            has_source = kind != "W" and stage != (0 if is_forward else last_stage)
            received = messages.receive(action.awaited) if has_source else None
            start = stamp()
            message: Message | None = None
            if is_forward:
                message = self._forward(action, received)
            elif kind == "W":
                self._compute_weight_gradients(action)
            else:
                message = self._backward(action, received)
            marks.append((action, start, stamp()))
            if message is not None:
                messages.send(*message)
        messages.wait_until_sent()
        self.history.append(marks)
        return self.total_loss

    def _forward(self, action: Action, activation: Tensor | None) -> Message | None:
        _, stage, microbatch = action
        is_split = (stage, microbatch) in self.split_backwards
        x = self.inputs[microbatch] if activation is None else activation.detach().requires_grad_()
        if activation is None and is_split and x.is_floating_point():
            x = x.detach().requires_grad_()  # shows which nodes of the graph compute activations
        self.select_dropout_masks(stage, microbatch)
        output = self.compute_stage(stage, x)
        is_last = stage == self.stage_count - 1
        if is_last:
            output = self.compute_loss(output, self.targets[microbatch])
            loss = output.detach()
            self.total_loss = loss if self.total_loss is None else self.total_loss + loss
        self.saved[stage, microbatch] = x, output
        if is_last:
            return None
        return Action("F", stage + 1, microbatch), output.detach()

    def select_dropout_masks(self, stage: int, microbatch: int) -> None:
        """Let the dropout layers of a stage use the masks of the samples of a microbatch."""
        for layer in self.dropout_layers[stage]:
            layer.select_share(microbatch, self.count)

    def _backward(self, action: Action, gradient: Tensor | None) -> Message | None:
        """Compute a whole backward (B), or only the gradient of the input (I)."""
        kind, stage, microbatch = action
        x, output = self.saved.pop((stage, microbatch))
        self.prepare_backward(stage)
        if kind == "I":
            from common.techniques.pipeline.split_backward import compute_input_gradient  # only few schedules split

            input_gradient, remaining = compute_input_gradient(x, output, gradient, is_wanted=stage > 0)
            self.weight_gradients[stage, microbatch] = remaining
        else:
            if output.requires_grad:  # false if the first stage has no parameters
                torch.autograd.backward(output, gradient)
            input_gradient = x.grad
        if stage == 0:
            return None
        if input_gradient is None:
            input_gradient = torch.zeros_like(x)
        return Action("B", stage - 1, microbatch), input_gradient

    def _compute_weight_gradients(self, action: Action) -> None:
        for gradients in self.weight_gradients.pop((action.stage, action.microbatch)):
            gradients.accumulate()

    # ---- evaluation

    @torch.no_grad()
    def predict(self, x: Tensor | None, count: int) -> Tensor | None:
        """Return the model's output [count, ...] on the rank with the last stage, and None elsewhere.

        All ranks must call this method, and they must call a collective after the last batch. Each stage sends its
        output to the next stage and continues with the next batch while later stages are still computing.
        """
        if not count:  # the replica's shard of the data may be empty
            return None
        network = self.messages.network
        activation = x
        for stage in sorted(self.local_stages):
            consumer = Action("F", stage, self.microbatches)  # microbatch number that no training message uses
            if stage and stage - 1 not in self.local_stages:
                shape = self.shapes[stage - 1]
                activation = torch.empty(count, *shape, dtype=self.dtype, device=self.world.device)
                network.receive(consumer, activation).wait()
            assert activation is not None
            activation = self.compute_stage(stage, activation)
            if stage < self.stage_count - 1 and stage + 1 not in self.local_stages:
                network.send(consumer._replace(stage=stage + 1), activation)
        network.wait_for_sends(max_pending=8)
        return activation if self.has_last_stage else None

    def collect_spans(self) -> list[list[Span]]:
        """Return the spans (actions with start and end times in seconds) of this rank's latest steps, oldest first."""
        seconds = self.clock.to_seconds
        steps = []
        for marks in self.history:
            steps.append([Span(action, seconds(start), seconds(end)) for action, start, end in marks])
        return steps

    @property
    def shared_memory_bytes(self) -> int:
        """Bytes that this rank sends to other ranks through shared memory in each step."""
        return self.messages.shared_memory_bytes

    @property
    def last_rank(self) -> int:
        """The rank with the last stage of the first replica, which computes the loss."""
        return self.stage_ranks[-1]


class PipelineEngine(ScheduleExecutor):
    """The built-in engine, which trains the stages of one rank according to the schedule of a config.

    `stages` contains all stages of the model; only the stages that this rank executes in the schedule are moved to the
    rank's device. `loss` must be a mean over samples. The engine divides the loss of each microbatch by the number of
    microbatches, so that the accumulated gradients equal those of the whole batch. `batch` is the number of samples in
    one step of this pipeline, and `sample` [1, ...] is one input, on the CPU.
    """

    def __init__(
        self,
        settings: PipelineConfig,
        stages: Sequence[nn.Sequential],
        loss: LossFunction,
        world: World,
        *,
        batch: int,
        sample: Tensor,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.loss = loss
        self.layers = [list(dict(stage.named_children())) for stage in stages]
        plan = schedules.make_schedule(settings)
        shapes = infer_boundary_shapes(stages, sample, dtype)
        local_stages = {
            stage: stages[stage].to(world.device)
            for stage, rank in enumerate(schedules.list_stage_ranks(plan))
            if rank == world.rank
        }
        super().__init__(
            plan, local_stages, shapes, world,
            microbatches=settings.microbatches, size=batch // settings.microbatches,
            dtype=dtype, transport=settings.transport,
        )  # fmt: skip
        self.module = nn.ModuleList(local_stages.values())
        """All stages of this rank as one module, from which, for example, the optimizer gets its parameters."""

    def step(self, x: Tensor | None, y: Tensor | None) -> Tensor | None:
        """Run forward and backward for one batch, and add the gradients to the parameters' `.grad`.

        The rank with the first stage must pass the inputs x [batch, ...], and the rank with the last stage must pass
        the targets y [batch]. The rank with the last stage returns the mean loss; see `execute`.
        """
        inputs = self._split_batch(x) if x is not None and self.has_first_stage else ()
        targets = self._split_batch(y) if y is not None and self.has_last_stage else ()
        return self.execute(inputs, targets, self._scale_loss, self.microbatches)

    def _split_batch(self, batch: Tensor) -> tuple[Tensor, ...]:
        """Return the microbatches of a batch.

        If there is only one microbatch, the batch itself is returned, because a view would be slower. The size of a
        microbatch is defined by `configs.batch_plan`. The microbatches of gradient accumulation are created by `Loader`
        instead.
        """
        return batch.chunk(self.microbatches) if self.microbatches > 1 else (batch,)

    def _scale_loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return a microbatch's contribution to the mean loss of the batch."""
        loss = self.loss(output, target)
        return loss / self.microbatches if self.microbatches > 1 else loss
