"""The pipeline of one process with several devices, one per stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from common.pipeline import schedules
from common.pipeline.schedules import Span
from common.pipeline.stage_tracer import StageTracer


class SingleProcessPipeline:
    """All stages of a model in this process, each on its own device.

    Work on a GPU is only queued: the call returns at once. In each tick the stages are queued from last to first, so
    that no GPU waits for the host (GPipe: Huang et al. 2019, arXiv 1811.06965).
    `loss` is a mean over samples; a batch has `microbatches` of `size` samples (`configs.batch_plan`).
    """

    has_first_stage = True
    has_last_stage = True
    last_rank = 0

    def __init__(
        self,
        stages: Sequence[nn.Sequential],
        loss: Callable[[Tensor, Tensor], Tensor],
        devices: Sequence[str],
        *,
        size: int,
        microbatches: int,
        schedule: str,
        pipelined: bool,
        dtype: torch.dtype,
    ) -> None:
        """If `pipelined`, all stages work at the same time, else one at a time.

        The ideal bubble is that of `schedule`.
        """
        self.loss = loss
        self.microbatch_size = size
        self.pipelined = pipelined
        self.devices = [torch.device(name) for name in devices]
        self.stages = [stage.to(device, dtype) for stage, device in zip(stages, self.devices, strict=True)]
        self.local_stages = dict(enumerate(self.stages))
        self.layers = [list(dict(stage.named_children())) for stage in stages]
        count = len(stages)
        self.plan = schedules.SCHEDULES[schedule](count, count, microbatches)
        self.module = nn.ModuleList(self.stages)
        self.tracer = StageTracer(self.stages, self.devices)

    def forward_stage(self, stage: int, microbatch: int, x: Tensor) -> Tensor:
        """Return the output [n, ...] of a stage, on its device.

        x [n, ...] is a microbatch.
        """
        return self.tracer.forward(stage, microbatch, x.to(self.devices[stage]))

    def forward_naive(self, x: Tensor, microbatch: int = 0) -> Tensor:
        """Return the model's output for x [n, ...], one stage at a time."""
        for stage in range(len(self.stages)):
            x = self.forward_stage(stage, microbatch, x)
        return x

    def forward_pipelined(self, x: Tensor) -> Tensor:
        """Return the model's output for x [N, ...].

        In each tick stage s works on microbatch tick - s.
        """
        parts = list(x.split(self.microbatch_size))
        for tick in range(len(parts) + len(self.stages) - 1):
            for stage in reversed(range(len(self.stages))):  # the last one first: its microbatch is the oldest
                microbatch = tick - stage
                if 0 <= microbatch < len(parts):
                    parts[microbatch] = self.forward_stage(stage, microbatch, parts[microbatch])
        return torch.cat(parts)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Train on x [N, ...] with targets y [N]; return the mean loss [].

        Backward also visits the devices in the order of their dependencies.
        """
        self.tracer.begin_step()
        y = y.to(self.devices[-1])
        if self.pipelined:
            loss = self.loss(self.forward_pipelined(x), y)
            loss.backward()
            return loss.detach()
        losses = []
        count = len(x) // self.microbatch_size
        inputs = x.split(self.microbatch_size)
        targets = y.split(self.microbatch_size)
        for microbatch, (part, target) in enumerate(zip(inputs, targets, strict=True)):
            loss = self.loss(self.forward_naive(part, microbatch), target) / count
            loss.backward()  # gradients are accumulated
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    @torch.no_grad()
    def predict(self, x: Tensor | None, count: int) -> Tensor:
        """Return the model's output [count, ...] for x [count, ...], on the device of x."""
        assert x is not None  # this process has the first stage
        return self.forward_naive(x).to(x.device)

    def collect_spans(self) -> list[list[list[Span]]]:
        """Return the recorded steps of each stage, oldest first, with times in seconds."""
        return self.tracer.collect_spans()
