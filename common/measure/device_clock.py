"""Time stamps that do not wait for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

MAX_STAMPED_STEPS = 100
"""Number of newest steps whose time stamps are stored."""
MAX_ZERO_AGE_SECONDS = 10.0
"""Time after which the zero is reset: CUDA counts milliseconds in a float, which then resolves 1 us."""


class TimedEvent(NamedTuple):
    """A CUDA event, with the event and the host time that its time is relative to."""

    event: torch.cuda.Event
    zero: torch.cuda.Event
    origin: float
    """Host time of `zero`, in seconds."""


Stamp = float | TimedEvent


class DeviceClock:
    """Time stamps in seconds, comparable between ranks of a host; on CUDA, of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.offset = 0.0
        """Host time that counts as 0 s."""
        self.stamp: Callable[[], Stamp] = self.record_stamp if self.is_cuda else time.perf_counter
        if self.is_cuda:
            self.reset_zero()

    def reset_zero(self) -> None:
        """Wait for the device and reset the zero, at which stream and host have the same time."""
        torch.cuda.synchronize(self.device)
        self.zero = self.record_event()
        self.origin = time.perf_counter()

    def begin_step(self) -> None:
        """Begin a step. Waits for the device every MAX_ZERO_AGE_SECONDS, so that stamps stay precise."""
        if self.is_cuda and time.perf_counter() - self.origin > MAX_ZERO_AGE_SECONDS:
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
        """Return whether the device has reached a stamp; does not wait."""
        return not isinstance(stamp, TimedEvent) or stamp.event.query()

    def set_zero_now(self) -> None:
        """Count seconds from now; ranks of several hosts call it at the same time."""
        self.offset = time.perf_counter()

    def to_seconds(self, stamp: Stamp) -> float:
        """Return a stamp in seconds; waits for the device to reach it."""
        if isinstance(stamp, TimedEvent):
            stamp.event.synchronize()
            return stamp.origin - self.offset + stamp.zero.elapsed_time(stamp.event) / 1e3
        return stamp - self.offset
