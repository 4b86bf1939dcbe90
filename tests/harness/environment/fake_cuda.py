"""A fake GPU for tests of timestamps. Tests set the time of its host."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch


class FakeGpu:
    """A GPU and its host. The host's time is `now`, and the GPU is `delay` seconds behind it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.delay = 0.0

    def create_event(self, **_: Any) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    """A CUDA event of a fake GPU."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.recorded_at = 0.0

    def record(self, _: Any) -> None:
        self.recorded_at = self.gpu.now

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return self.recorded_at <= self.gpu.now - self.gpu.delay

    def elapsed_time(self, later: FakeEvent) -> float:
        """Return milliseconds with the precision of CUDA, which returns a C float."""
        milliseconds = (later.recorded_at - self.recorded_at) * 1e3
        return float(np.float32(milliseconds))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """A fake GPU that replaces the events of torch.cuda, and whose host replaces time.perf_counter."""
    fake_gpu = FakeGpu()
    monkeypatch.setattr(torch.cuda, "Event", fake_gpu.create_event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(time, "perf_counter", lambda: fake_gpu.now)
    return fake_gpu
