"""Time until the backward pass, by which ranks are compared while they train."""

from __future__ import annotations

import torch
from torch import nn

from common.measure import step_timing


def test_the_time_until_the_backward_pass_is_known_after_enough_steps() -> None:
    timer = step_timing.StepTimer(nn.Linear(1, 1), torch.device("cpu"))
    for _ in timer.iterate_batches(range(step_timing.WARM_UP + step_timing.MIN_STEPS)):
        timer.record_mark("backward")
        assert timer.estimate_seconds_to_backward() is None
    assert timer.estimate_seconds_to_backward() is not None
