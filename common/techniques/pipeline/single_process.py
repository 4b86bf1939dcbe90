"""Pipeline in a single process that uses several devices, one per stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from common.models.sample_dropout import list_dropout_layers
from common.techniques.pipeline import schedules
from common.techniques.pipeline.schedules import Span
from common.techniques.pipeline.stage_tracer import StageTracer


class SingleProcessPipeline:
    """A pipeline with all stages of a model in this process, each stage on a separate device.

    On a GPU, calling a stage only queues work and returns immediately. In each tick, the work of the stages is queued
    from the last stage to the first, so that no GPU waits for the host. The method is GPipe (Huang et al. 2019, arXiv
    1811.06965). `loss` must be a mean over samples. A batch consists of `microbatches` microbatches of `size` samples
    each (see `configs.batch_plan`).
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
        """Move each stage to its device.

        If `pipelined` is true, all stages work at the same time; otherwise, only one stage works at a time. `schedule`
        is the name of the schedule for which the report computes the ideal bubble.
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
        self.microbatches = microbatches
        self.dropout_layers = [list_dropout_layers([stage]) for stage in self.stages]
        self.tracer = StageTracer(self.stages, self.devices)

    def forward_stage(self, stage: int, microbatch: int, x: Tensor) -> Tensor:
        """Return the output [n, ...] of a stage for a microbatch x [n, ...].

        The output is on the device of the stage.
        """
        for layer in self.dropout_layers[stage]:
            layer.select_share(microbatch, self.microbatches)
        return self.tracer.forward(stage, microbatch, x.to(self.devices[stage]))

    def forward_naive(self, x: Tensor, microbatch: int = 0) -> Tensor:
        """Return the model's output for x [n, ...], computing one stage at a time."""
        for stage in range(len(self.stages)):
            x = self.forward_stage(stage, microbatch, x)
        return x

    def forward_pipelined(self, x: Tensor) -> Tensor:
        """Return the model's output for x [N, ...], with all stages working at the same time.

        In tick t, stage s processes microbatch t - s.
        """
        parts = list(x.split(self.microbatch_size))
        for tick in range(len(parts) + len(self.stages) - 1):
            for stage in reversed(range(len(self.stages))):  # the last stage has the oldest microbatch
                microbatch = tick - stage
                if 0 <= microbatch < len(parts):
                    parts[microbatch] = self.forward_stage(stage, microbatch, parts[microbatch])
        return torch.cat(parts)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Run forward and backward for x [N, ...] with targets y [N]; return the mean loss.

        The mean loss is a 0-d tensor. Autograd runs the backward of each stage on the device of the stage.
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
            loss.backward()  # accumulates gradients
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    @torch.no_grad()
    def predict(self, x: Tensor | None, count: int) -> Tensor:
        """Return the model's output [count, ...] for x [count, ...], on the device of x."""
        assert x is not None  # x is never None, because this process has the first stage
        return self.forward_naive(x).to(x.device)

    def collect_spans(self) -> list[list[list[Span]]]:
        """Return, for each stage, the spans (in seconds) of the stage in the latest steps, oldest step first."""
        return self.tracer.collect_spans()
