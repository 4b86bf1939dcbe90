"""Time stamps that do not wait for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

HISTORY = 100  # steps whose time stamps are kept
RENEWED = 10.0  # seconds after which the zero is reset: CUDA counts in a float, whose spacing is then 1 us


class TimedEvent(NamedTuple):
    """A CUDA event, and the event and host time that it counts from."""

    event: torch.cuda.Event
    zero: torch.cuda.Event
    origin: float
    """Host time of `zero`, in seconds."""


Stamp = float | TimedEvent


class DeviceClock:
    """Time stamps in seconds, comparable between ranks of a host; on CUDA, of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self.start = 0.0
        self.stamp: Callable[[], Stamp] = self.record_stamp if self.cuda else time.perf_counter
        if self.cuda:
            self.reset_zero()

    def reset_zero(self) -> None:
        """Wait for the device and reset the zero, which relates the time of the stream to that of the host."""
        torch.cuda.synchronize(self.device)
        self.zero, self.origin = self.record_event(), time.perf_counter()

    def begin_step(self) -> None:
        """Begin a step. Waits for the device every RENEWED seconds, so that stamps stay precise in a long run."""
        if self.cuda and time.perf_counter() - self.origin > RENEWED:
            self.reset_zero()

    def record_event(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def record_stamp(self) -> TimedEvent:
        """Record a time stamp on the current stream."""
        return TimedEvent(self.record_event(), self.zero, self.origin)

    def has_reached(self, stamp: Stamp) -> bool:
        """Return whether the device has reached a stamp, without waiting for it."""
        return not isinstance(stamp, TimedEvent) or stamp.event.query()

    def set_zero_now(self) -> None:
        """Count seconds from now; ranks of several hosts call it at the same moment."""
        self.start = time.perf_counter()

    def to_seconds(self, stamp: Stamp) -> float:
        """Return a stamp in seconds; waits for the device to reach it."""
        if isinstance(stamp, TimedEvent):
            stamp.event.synchronize()
            return stamp.origin - self.start + stamp.zero.elapsed_time(stamp.event) / 1e3
        return stamp - self.start
