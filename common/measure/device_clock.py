"""A clock that records timestamps of work on a device without waiting for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

MAX_STAMPED_STEPS = 100
"""Number of steps whose timestamps are stored; older steps are discarded."""
MAX_ZERO_AGE_SECONDS = 10.0
"""Age at which the reference event of a clock is replaced. CUDA returns the time between two events as milliseconds in
a 32-bit float, whose resolution is about 1 us for a time of 10 seconds."""


class TimedEvent(NamedTuple):
    """A timestamp on a GPU: a CUDA event, and an earlier event as time reference."""

    event: torch.cuda.Event
    zero: torch.cuda.Event
    """Reference event, which was recorded before `event`."""
    origin: float
    """Value of time.perf_counter() on the host when the reference event was recorded."""


Stamp = float | TimedEvent
"""Timestamp of a device: seconds on a CPU, or a CUDA event on a GPU."""


class DeviceClock:
    """A clock whose timestamps are comparable between the ranks of a host.

    On a GPU, a timestamp is an event on the current CUDA stream. On a CPU, a timestamp is a value of
    time.perf_counter().
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.offset = 0.0
        """Value of time.perf_counter() that `to_seconds` converts to 0 seconds."""
        self.stamp: Callable[[], Stamp] = self.record_stamp if self.is_cuda else time.perf_counter
        if self.is_cuda:
            self.reset_reference_event()

    def reset_reference_event(self) -> None:
        """Wait for the GPU, and record a new reference event and the host time."""
        torch.cuda.synchronize(self.device)
        self.zero = self.record_event()
        self.origin = time.perf_counter()

    def refresh_reference_event(self) -> None:
        """Replace the reference event if it is older than MAX_ZERO_AGE_SECONDS.

        A recent reference event keeps the timestamps precise. To record a new event, this method waits for the GPU. On
        a CPU, this method does nothing.
        """
        if self.is_cuda and time.perf_counter() - self.origin > MAX_ZERO_AGE_SECONDS:
            self.reset_reference_event()

    def record_event(self) -> torch.cuda.Event:
        """Record an event on the current CUDA stream, and return it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def record_stamp(self) -> TimedEvent:
        """Record a timestamp on the current CUDA stream, and return it."""
        return TimedEvent(self.record_event(), self.zero, self.origin)

    def has_reached_stamp(self, stamp: Stamp) -> bool:
        """Return whether the device has reached a timestamp.

        This method does not wait for the device.
        """
        return not isinstance(stamp, TimedEvent) or stamp.event.query()

    def set_origin_now(self) -> None:
        """Set the origin of `to_seconds` to the current time.

        Ranks on different hosts must call this method at the same time.
        """
        self.offset = time.perf_counter()

    def to_seconds(self, stamp: Stamp) -> float:
        """Convert a timestamp to seconds since the origin.

        On a GPU, this method waits until the GPU has reached the timestamp.
        """
        if isinstance(stamp, TimedEvent):
            stamp.event.synchronize()
            return stamp.origin - self.offset + stamp.zero.elapsed_time(stamp.event) / 1e3
        return stamp - self.offset
