"""Pipeline engine that uses torch.distributed.pipelining, for comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining

from common.techniques.pipeline.executor import Marks, PipelineEngine
from common.techniques.pipeline.schedules import Action, Schedule
from configs.pipeline import PipelineConfig

SINGLE_STAGE_SCHEDULES = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
MULTI_STAGE_SCHEDULES = {
    "gpipe": pipelining.ScheduleLoopedBFS,
    "1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}


class ContiguousStage(nn.Module):
    """A stage whose output and input gradient are contiguous, as required by gloo and nccl.

    The shapes of the input and the output are [n, ...].
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.contiguous())
        output: Tensor = self.module(x)
        return output.contiguous()


class TimedStage(pipelining.PipelineStage):
    """A stage of torch.distributed.pipelining that records the times of its actions."""

    owner: TorchPipelineEngine

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.owner.select_dropout_masks(self.stage_index, self.owner.first_microbatch + fwd_chunk_id)
        with self.owner.record_action_time("F", self, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        is_full = kwargs.get("full_backward", args[1] if len(args) > 1 else True)
        with self.owner.record_action_time("B" if is_full else "I", self, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.owner.record_action_time("W", self, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


def read_library_actions(library_actions: Sequence[Any]) -> list[Action]:
    """Convert a rank's order of actions in torch.distributed.pipelining, in which None stands for idle time.

    The library executes the parts of an overlapped action one after the other.
    """
    actions = []
    for library_action in library_actions:
        if library_action is None:
            continue
        for part in library_action.sub_actions or (library_action,):
            actions.append(Action(part.computation_type.value, part.stage_index, part.microbatch_index))
    return actions


class TorchPipelineEngine(PipelineEngine):
    """Engine that trains with torch.distributed.pipelining and evaluates like `PipelineEngine`.

    The input and output shapes of each stage are passed to the library. Otherwise, the library would infer the shapes
    with a forward pass in train mode, which changes the statistics of BatchNorm. The library has no naive schedule, so
    the naive schedule is executed as GPipe with one microbatch per call.
    """

    def __init__(self, settings: PipelineConfig, *args: Any, sample: Tensor, **kwargs: Any) -> None:
        super().__init__(settings, *args, sample=sample, **kwargs)
        is_naive = settings.schedule == "naive"
        self.call_microbatches = 1 if is_naive else self.microbatches
        """Number of microbatches per call of torch.distributed.pipelining."""
        stages = [self._make_stage(index, module, sample) for index, module in self.local_stages.items()]
        name = "gpipe" if is_naive else settings.schedule
        is_single_stage = settings.stages_per_process == 1 and name in SINGLE_STAGE_SCHEDULES
        make: Any = (SINGLE_STAGE_SCHEDULES if is_single_stage else MULTI_STAGE_SCHEDULES)[name]
        self.schedule: Any = make(
            stages[0] if is_single_stage else stages,
            self.call_microbatches,
            loss_fn=self._scale_loss,
            scale_grads=False,
        )
        if not (is_single_stage or is_naive):
            self.plan = self._read_library_plan()

    @property
    def shared_memory_bytes(self) -> int:
        """Zero, because torch.distributed.pipelining sends all training messages through the network."""
        return 0

    def _make_stage(self, index: int, module: nn.Module, sample: Tensor) -> TimedStage:
        if index > 0:
            example_input = self._make_example_tensor(self.shapes[index - 1], self.dtype).requires_grad_()
        else:
            example_input = self._make_example_tensor(sample.shape[1:], sample.dtype)
        example_output = self._make_example_tensor(self.shapes[index], self.dtype)
        example_output.requires_grad_()  # the library sends gradients only to inputs that require gradients
        stage = TimedStage(
            ContiguousStage(module), index, self.stage_count, self.world.device,
            input_args=example_input, output_args=example_output, group=self.world.group,
        )  # fmt: skip
        stage.owner = self
        return stage

    def _make_example_tensor(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a tensor for one microbatch of samples with this shape."""
        return torch.empty(self.microbatch_size, *shape, dtype=dtype, device=self.world.device)

    def _read_library_plan(self) -> Schedule:
        """Return, as a `Schedule`, the order in which torch.distributed.pipelining executes actions."""
        order = self.schedule.pipeline_order
        return [read_library_actions(order[rank]) for rank in range(self.world.size)]

    @contextlib.contextmanager
    def record_action_time(self, kind: str, stage: TimedStage, chunk: int) -> Iterator[None]:
        """Record the start and end of the `with` block, which processes one microbatch in a stage."""
        start = self.clock.stamp()
        yield
        action = Action(kind, stage.stage_index, self.first_microbatch + chunk)
        self.marks.append((action, start, self.clock.stamp()))

    def step(self, x: Tensor | None, y: Tensor | None) -> Tensor | None:
        """Run forward and backward for one batch; see `PipelineEngine.step`."""
        self.clock.refresh_reference_event()
        self.marks: Marks = []
        losses: list[Tensor] = []
        call_losses: list[Tensor] = []  # the library clears this list at every call
        calls = self.microbatches // self.call_microbatches
        inputs = x.chunk(calls) if x is not None and self.has_first_stage else None
        targets = y.chunk(calls) if y is not None and self.has_last_stage else None
        for call in range(calls):
            self.first_microbatch = call
            args = (inputs[call],) if inputs else ()
            kwargs = {"target": targets[call], "losses": call_losses} if targets else {}
            self.schedule.step(*args, **kwargs, return_outputs=False)
            losses += call_losses
        self.history.append(self.marks)
        if not losses:
            return None
        return torch.stack([loss.detach() for loss in losses]).sum()
