"""Timeline of the stages of one process, by time stamps that do not wait for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from common.measure.device_clock import HISTORY, DeviceClock, Stamp
from common.pipeline.schedules import Action, Span


class StageTracer:
    """Records when each stage, on its own device, works on which microbatch, forward and backward.

    Backward runs inside autograd, so hooks record it: when it reaches the stage's output, and when it leaves through
    the stage's input.
    """

    def __init__(self, stages: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
        self.stages = stages
        self.clocks = [DeviceClock(device) for device in devices]
        self.history: deque[dict[Action, list[Stamp]]] = deque(maxlen=HISTORY)
        # the input of the first stage has no gradient: hook its first layer instead
        next(stages[0].children()).register_forward_hook(self._hook_first_layer)
        self.on_first = 0

    def begin_step(self) -> None:
        """Begin a step."""
        for clock in self.clocks:
            clock.begin_step()
        self.history.append({})

    def forward(self, stage: int, microbatch: int, x: Tensor) -> Tensor:
        """Return the stage's output [n, ...] for a microbatch x [n, ...], and record its forward and backward."""
        if not torch.is_grad_enabled():
            return self.stages[stage](x)
        if stage and x.requires_grad:
            x = x.view_as(x)  # a node of this stage alone
            assert x.grad_fn is not None
            x.grad_fn.register_hook(lambda *_: self._mark("B", stage, microbatch))
        self.on_first = microbatch
        self._mark("F", stage, microbatch)
        out: Tensor = self.stages[stage](x)
        self._mark("F", stage, microbatch)
        if out.grad_fn is not None:
            out.grad_fn.register_prehook(lambda _: self._mark("B", stage, microbatch))
        return out

    def _hook_first_layer(self, layer: nn.Module, given: Any, out: Tensor) -> None:
        microbatch = self.on_first
        if torch.is_grad_enabled() and out.grad_fn is not None:
            out.grad_fn.register_hook(lambda *_: self._mark("B", 0, microbatch))

    def _mark(self, kind: str, stage: int, microbatch: int) -> None:
        self.history[-1].setdefault(Action(kind, stage, microbatch), []).append(self.clocks[stage].stamp())

    def collect_spans(self) -> list[list[list[Span]]]:
        """Return each stage's newest steps, oldest first, with times in seconds."""
        return [[self._make_spans(stage, step) for step in self.history] for stage in range(len(self.stages))]

    def _make_spans(self, stage: int, step: dict[Action, list[Stamp]]) -> list[Span]:
        seconds = self.clocks[stage].to_seconds
        spans = [Span(a, seconds(s[0]), seconds(s[-1])) for a, s in step.items() if a.stage == stage]
        return sorted(spans, key=lambda span: span.start)
