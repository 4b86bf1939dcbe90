"""Time stamps that do not wait for the device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Stamp = float | torch.cuda.Event


class Clock:
    """Time stamps in seconds, comparable between processes of a host; on CUDA, the time of the stream."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.start = 0.0
        self.stamp: Callable[[], Stamp] = self.event if self.cuda else time.perf_counter
        if self.cuda:
            torch.cuda.synchronize()
            self.zero, self.origin = self.event(), time.perf_counter()

    def event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start_now(self) -> None:
        """Count from here; processes of several hosts call it at the same moment."""
        self.start = time.perf_counter()

    def seconds(self, stamp: Stamp) -> float:
        if isinstance(stamp, torch.cuda.Event):
            stamp.synchronize()
            return self.origin - self.start + self.zero.elapsed_time(stamp) / 1e3
        return stamp - self.start
