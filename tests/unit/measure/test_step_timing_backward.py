"""Time until the backward pass, by which ranks are compared while they train."""

from __future__ import annotations

import torch
from torch import nn

from common.measure import steady_steps, step_timing


def test_the_time_until_the_backward_pass_is_known_after_enough_steps() -> None:
    timer = step_timing.StepTimer(nn.Linear(1, 1), torch.device("cpu"))
    for _ in timer.iterate_batches(range(steady_steps.WARM_UP + step_timing.MIN_STEPS)):
        timer.record_mark("backward")
        assert timer.estimate_seconds_to_backward() is None
    assert timer.estimate_seconds_to_backward() is not None


def test_the_forward_passes_of_later_microbatches_do_not_count() -> None:
    layer = nn.Linear(1, 1)
    timer = step_timing.StepTimer(nn.Sequential(layer), torch.device("cpu"), [layer])
    for _ in timer.iterate_batches(range(steady_steps.WARM_UP + 1)):
        layer(torch.ones(1, 1))
        timer.record_mark("backward")
        layer(torch.ones(1, 1))
    (step,) = timer.history
    assert len(step.layer_spans) == 1
