"""Timestamps of a GPU stay precise in runs of any length, on a fake GPU."""

from __future__ import annotations

import time

import pytest
import torch

from common.measure import device_clock
from tests.harness.environment.fake_cuda import FakeGpu, gpu

__all__ = ["gpu"]

STEP_SECONDS = 0.0123456
DAY_SECONDS = 86_400.0


def test_timestamps_of_a_step_are_equally_precise_after_a_day(gpu: FakeGpu) -> None:
    clock = device_clock.DeviceClock(torch.device("cuda", 0))
    clock.refresh_reference_event()
    first_day = clock.stamp()
    gpu.now += DAY_SECONDS
    clock.refresh_reference_event()
    step_start = clock.stamp()
    gpu.now += STEP_SECONDS
    step_end = clock.stamp()

    step_seconds = clock.to_seconds(step_end) - clock.to_seconds(step_start)
    assert step_seconds == pytest.approx(STEP_SECONDS, abs=2e-6)
    day_seconds = clock.to_seconds(step_start) - clock.to_seconds(first_day)
    assert day_seconds == pytest.approx(DAY_SECONDS, abs=2e-6), "older timestamps keep their reference event"


def test_most_steps_do_not_wait_for_the_gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waits.append(gpu.now))
    clock = device_clock.DeviceClock(torch.device("cuda", 0))
    for _ in range(1000):
        gpu.now += 0.025
        clock.refresh_reference_event()
    assert len(waits) == 3, "waits at the start and every ten seconds"


@pytest.mark.parametrize("boot_seconds", [0.0, 50_000.0])
def test_the_origin_does_not_depend_on_the_start_of_the_host(
    boot_seconds: float, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: gpu.now - boot_seconds)
    clock = device_clock.DeviceClock(torch.device("cpu"))
    gpu.now = 60_000.0
    clock.set_origin_now()  # all hosts do so after a barrier
    gpu.now = 60_001.5
    assert clock.to_seconds(clock.stamp()) == 1.5
