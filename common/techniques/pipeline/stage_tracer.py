"""Recording of when each stage of a single-process pipeline works, with asynchronous time stamps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from common.measure.device_clock import MAX_STAMPED_STEPS, DeviceClock, Stamp
from common.techniques.pipeline.schedules import Action, Span


class StageTracer:
    """Recorder of the times at which each stage runs the forward and the backward of each microbatch.

    Each stage is on a separate device. Backward runs inside autograd, so hooks record when backward reaches the output
    of a stage, and when backward has computed the gradient of the stage's input.
    """

    def __init__(self, stages: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
        self.stages = stages
        self.clocks = [DeviceClock(device) for device in devices]
        self.history: deque[dict[Action, list[Stamp]]] = deque(maxlen=MAX_STAMPED_STEPS)
        # the input of the first stage has no gradient, so the hook is on its first layer
        next(stages[0].children()).register_forward_hook(self._hook_first_layer)
        self.current_microbatch = 0

    def begin_step(self) -> None:
        """Start recording a new step."""
        for clock in self.clocks:
            clock.refresh_reference_event()
        self.history.append({})

    def forward(self, stage: int, microbatch: int, x: Tensor) -> Tensor:
        """Return the output [n, ...] of a stage for a microbatch x [n, ...].

        The times of the forward and of the later backward are recorded.
        """
        if not torch.is_grad_enabled():
            return self.stages[stage](x)
        if stage and x.requires_grad:
            x = x.view_as(x)  # creates an autograd node that belongs only to this stage
            assert x.grad_fn is not None
            x.grad_fn.register_hook(lambda *_: self._record_stamp("B", stage, microbatch))
        self.current_microbatch = microbatch
        self._record_stamp("F", stage, microbatch)
        output: Tensor = self.stages[stage](x)
        self._record_stamp("F", stage, microbatch)
        if output.grad_fn is not None:
            output.grad_fn.register_prehook(lambda _: self._record_stamp("B", stage, microbatch))
        return output

    def _hook_first_layer(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        microbatch = self.current_microbatch
        if torch.is_grad_enabled() and output.grad_fn is not None:
            output.grad_fn.register_hook(lambda *_: self._record_stamp("B", 0, microbatch))

    def _record_stamp(self, kind: str, stage: int, microbatch: int) -> None:
        stamps = self.history[-1].setdefault(Action(kind, stage, microbatch), [])
        stamps.append(self.clocks[stage].stamp())

    def collect_spans(self) -> list[list[list[Span]]]:
        """Return, for each stage, the spans (in seconds) of the stage in the latest steps, oldest step first."""
        stages = range(len(self.stages))
        return [self._collect_stage_spans(stage) for stage in stages]

    def _collect_stage_spans(self, stage: int) -> list[list[Span]]:
        seconds = self.clocks[stage].to_seconds
        steps = []
        for stamps_by_action in self.history:
            spans = []
            for action, stamps in stamps_by_action.items():
                if action.stage == stage:
                    spans.append(Span(action, seconds(stamps[0]), seconds(stamps[-1])))
            steps.append(sorted(spans, key=lambda span: span.start))
        return steps
