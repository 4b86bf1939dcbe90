"""The pipeline on torch.distributed.pipelining, to compare with and for its further schedules.

Interleaved 1F1B: Narayanan et al. 2021, arXiv 2104.04473, section 2.2. Zero bubble: Qi et al. 2023, arXiv 2401.10241.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining

from common.pipeline.executor import Marks, PipelineEngine
from common.pipeline.schedules import Action, Schedule
from configs.pipeline import PipelineConfig

SINGLE = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
MULTI = {
    "gpipe": pipelining.ScheduleLoopedBFS,
    "1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
}


class ContiguousStage(nn.Module):
    """A stage whose output and input gradient are contiguous, as gloo and nccl need them; [n, ...] -> [n, ...]."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.contiguous())
        out: Tensor = self.module(x).contiguous()
        return out


class TimedStage(pipelining.PipelineStage):
    """A stage of the library that records when it computes."""

    owner: TorchPipelineEngine

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.owner.record_time("F", self, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        full = kwargs.get("full_backward", args[1] if len(args) > 1 else True)
        with self.owner.record_time("B" if full else "I", self, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.owner.record_time("W", self, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


class TorchPipelineEngine(PipelineEngine):
    """`PipelineEngine` whose training step is the library's; evaluation is inherited.

    The shapes of both ends of each stage are given: otherwise the library infers them by a forward in train mode,
    which changes BatchNorm's statistics. The library has no naive schedule: it is GPipe with one microbatch at a time.
    """

    def __init__(self, settings: PipelineConfig, *args: Any, sample: Sequence[int], **kwargs: Any) -> None:
        super().__init__(settings, *args, sample=sample, **kwargs)
        self.at_once = 1 if settings.schedule == "naive" else self.microbatches
        parts = [self._make_stage(index, module, sample) for index, module in self.local.items()]
        name = "gpipe" if settings.schedule == "naive" else settings.schedule
        common: dict[str, Any] = {"n_microbatches": self.at_once, "loss_fn": self._scale_loss, "scale_grads": False}
        self.schedule: Any
        if settings.stages_per_process == 1 and name in SINGLE:
            self.schedule = SINGLE[name](parts[0], **common)
        else:
            self.schedule = MULTI[name](parts, **common)
            if settings.schedule != "naive":
                self.plan = self._read_library_plan()

    def _make_stage(self, index: int, module: nn.Module, sample: Sequence[int]) -> TimedStage:
        shapes = [torch.Size(sample), *self.shapes]
        before, after = (
            torch.empty(self.size, *shape, dtype=self.dtype, device=self.world.device)
            for shape in shapes[index : index + 2]
        )
        after.requires_grad_()  # the library sends gradients only to inputs that require them
        before.requires_grad_(index > 0)
        ends: Any = {"input_args": before, "output_args": after, "group": self.world.group}
        stage = TimedStage(ContiguousStage(module), index, self.count, self.world.device, **ends)
        stage.owner = self
        return stage

    def _scale_loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return a microbatch's contribution to the mean loss of the batch."""
        return self.loss(output, target) / self.microbatches

    def _read_library_plan(self) -> Schedule:
        """Return the library's own order of actions as a `Schedule`."""
        orders = self.schedule.pipeline_order
        return [
            [Action(a.computation_type.value, a.stage_index, a.microbatch_index) for a in orders[rank] if a is not None]
            for rank in range(self.world.size)
        ]

    @contextlib.contextmanager
    def record_time(self, kind: str, stage: TimedStage, chunk: int) -> Iterator[None]:
        """Record the time of the block, which works on a microbatch of a stage."""
        start = self.clock.stamp()
        yield
        self.marks.append((Action(kind, stage.stage_index, self.offset + chunk), start, self.clock.stamp()))

    def step(self, x: Tensor | None, y: Tensor | None) -> Tensor | None:
        """Forward and backward of one batch, as `PipelineEngine.step`."""
        self.clock.begin_step()
        self.marks: Marks = []
        losses: list[Tensor] = []
        newest: list[Tensor] = []  # the library clears it at every call
        rounds = self.microbatches // self.at_once
        xs = x.chunk(rounds) if x is not None and self.has_first else None
        ys = y.chunk(rounds) if y is not None and self.has_last else None
        for self.offset in range(rounds):
            inputs = (xs[self.offset],) if xs else ()
            targets = {"target": ys[self.offset], "losses": newest} if ys else {}
            self.schedule.step(*inputs, **targets, return_outputs=False)
            losses += newest
        self.history.append(self.marks)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else None
