"""Durations of steps and of their parts, on a fake GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from common.measure import steady_steps, step_timing
from common.techniques.pipeline.stage_tracer import StageTracer
from tests.harness.environment.fake_cuda import FakeGpu, gpu

__all__ = ["gpu"]

STEP_SECONDS = 0.0123456
DAY_SECONDS = 86_400.0


def test_stage_tracer_and_step_timer_measure_each_step_from_its_start(gpu: FakeGpu) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    tracer = StageTracer([model], [torch.device("cuda", 0)])
    timer = step_timing.StepTimer(model, torch.device("cuda", 0))
    timer.steps_to_skip = 0
    gpu.now += DAY_SECONDS
    for batch in timer.iterate_batches([torch.ones(1, 1)] * 3):
        tracer.begin_step()
        output = tracer.forward(0, 0, batch)
        timer.record_mark("backward")
        gpu.now += STEP_SECONDS
        output.sum().backward()
        timer.record_mark("end of backward")

    rank_times = timer.summarize_steps()
    assert rank_times is not None
    assert rank_times.step == pytest.approx(STEP_SECONDS, abs=2e-6)
    (steps,) = tracer.collect_spans()
    for forward, backward in steps:
        assert forward.start == forward.end
        assert backward.start - forward.end == pytest.approx(STEP_SECONDS, abs=2e-6)


def test_only_steps_that_the_gpu_has_completed_are_measured(gpu: FakeGpu) -> None:
    timer = step_timing.StepTimer(nn.Sequential(nn.Linear(1, 1)), torch.device("cuda", 0))
    fast_steps = steady_steps.WARM_UP + step_timing.MIN_STEPS
    slow_steps = step_timing.MIN_STEPS
    for number, _ in enumerate(timer.iterate_batches([0] * (fast_steps + slow_steps))):
        gpu.now += STEP_SECONDS if number < fast_steps else 3 * STEP_SECONDS
        timer.record_mark("backward")
    assert timer.estimate_seconds_to_backward() == pytest.approx(2 * STEP_SECONDS, abs=2e-6), "median of all steps"

    gpu.delay = 3 * STEP_SECONDS * (slow_steps - 0.5)
    assert timer.estimate_seconds_to_backward() == pytest.approx(STEP_SECONDS, abs=2e-6), "median of completed steps"

    gpu.delay = 100.0
    assert timer.estimate_seconds_to_backward() is None


class WaitingLayer(nn.Linear):
    """A layer that computes for STEP_SECONDS and then waits for other ranks for three times as long."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__(1, 1)
        self.gpu = gpu
        self.waiting_seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gpu.now += 4 * STEP_SECONDS
        self.waiting_seconds += 3 * STEP_SECONDS
        return super().forward(x)

    def pop_waiting_seconds(self) -> float:
        seconds = self.waiting_seconds
        self.waiting_seconds = 0.0
        return seconds


@pytest.mark.parametrize("sharded_layers", [0, 1])
def test_the_forward_time_excludes_only_the_waiting_time_of_the_forward_pass(sharded_layers: int, gpu: FakeGpu) -> None:
    model = nn.Sequential(WaitingLayer(gpu), WaitingLayer(gpu))
    timer = step_timing.StepTimer(model, torch.device("cuda", 0), model[:sharded_layers])
    for batch in timer.iterate_batches([torch.ones(1, 1)] * (steady_steps.WARM_UP + 1)):
        model(batch)
        timer.record_backward_start()
        model(batch)  # as with recomputation
    rank_times = timer.summarize_steps()
    assert rank_times is not None
    measured_layers = sharded_layers or len(model)
    assert rank_times.before_backward == pytest.approx(measured_layers * STEP_SECONDS, abs=2e-6)
