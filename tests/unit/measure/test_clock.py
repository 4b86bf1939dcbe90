"""Time stamps of a GPU stay precise however long a run takes. The device is played: it has the host's time."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from common.measure import device_clock, step_timing
from common.techniques.pipeline.stage_tracer import StageTracer


class Played:
    """A host and its GPU, at `now` seconds; as an event, CUDA's: milliseconds between two are a C float."""

    now = 0.0
    behind = 0.0
    """Seconds that the GPU is behind the host."""

    def __init__(self, **_: Any) -> None: ...

    def record(self, _: Any) -> None:
        self.at = Played.now

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return self.at <= Played.now - Played.behind

    def elapsed_time(self, later: Played) -> float:
        return float(np.float32((later.at - self.at) * 1e3))


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Played, "now", 100.0)
    monkeypatch.setattr(torch.cuda, "Event", Played)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(time, "perf_counter", lambda: Played.now)


STEP, DAY = 0.0123456, 86_400.0


def test_stamps_of_a_step_are_as_precise_after_a_day_as_at_once() -> None:
    device = device_clock.DeviceClock(torch.device("cuda", 0))
    device.refresh_reference_event()
    early = device.stamp()
    Played.now += DAY
    device.refresh_reference_event()
    first = device.stamp()
    Played.now += STEP
    last = device.stamp()
    assert device.to_seconds(last) - device.to_seconds(first) == pytest.approx(STEP, abs=2e-6)
    assert device.to_seconds(first) - device.to_seconds(early) == pytest.approx(DAY, abs=2e-6), (
        "older stamps keep their zero"
    )


def test_steps_within_a_zero_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waits.append(Played.now))
    device = device_clock.DeviceClock(torch.device("cuda", 0))
    for _ in range(1000):
        Played.now += 0.025
        device.refresh_reference_event()
    assert len(waits) == 3, "at the start and every ten seconds"


def test_watch_and_step_times_begin_their_steps() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    watch = StageTracer([model], [torch.device("cuda", 0)])
    times = step_timing.StepTimer(model, torch.device("cuda", 0))
    times.steps_to_skip = 0
    Played.now += DAY
    for x in times.iterate_batches([torch.ones(1, 1)] * 3):
        watch.begin_step()
        out = watch.forward(0, 0, x)
        times.record_mark("backward")
        Played.now += STEP
        out.sum().backward()
        times.record_mark("end of backward")
    found = times.summarize_steps()
    assert found is not None and found.step == pytest.approx(STEP, abs=2e-6)
    for (forward, backward), *_ in watch.collect_spans():
        assert forward.start == forward.end and backward.start - forward.end == pytest.approx(STEP, abs=2e-6)


def test_a_gpu_is_asked_only_for_steps_that_it_has_come_to_the_end_of(monkeypatch: pytest.MonkeyPatch) -> None:
    times = step_timing.StepTimer(nn.Sequential(nn.Linear(1, 1)), torch.device("cuda", 0))
    for number, _ in enumerate(times.iterate_batches([0] * (step_timing.WARM_UP + 2 * step_timing.MIN_STEPS))):
        Played.now += STEP if number < step_timing.WARM_UP + step_timing.MIN_STEPS else 3 * STEP
        times.record_mark("backward")
    assert times.estimate_seconds_to_backward() == pytest.approx(2 * STEP, abs=2e-6), "the median of all"
    monkeypatch.setattr(Played, "behind", 3 * STEP * (step_timing.MIN_STEPS - 0.5))
    assert times.estimate_seconds_to_backward() == pytest.approx(STEP, abs=2e-6), "of those that it has come to"
    monkeypatch.setattr(Played, "behind", 100.0)
    assert times.estimate_seconds_to_backward() is None


def test_hosts_that_count_from_their_own_start_have_one_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for booted in (0.0, 50_000.0):
        monkeypatch.setattr(time, "perf_counter", lambda booted=booted: Played.now - booted)
        host = device_clock.DeviceClock(torch.device("cpu"))
        monkeypatch.setattr(Played, "now", 60_000.0)
        host.set_origin_now()  # behind a barrier
        monkeypatch.setattr(Played, "now", 60_001.5)
        found.append(host.to_seconds(host.stamp()))
    assert found == [1.5, 1.5]
