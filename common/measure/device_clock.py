"""Time stamps that do not wait for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

HISTORY = 100  # steps whose time stamps are kept
RENEWED = 10.0  # seconds that a clock counts from one zero: CUDA does so in a float, whose spacing is then 1 us


class TimedEvent(NamedTuple):
    """A time stamp of a stream, and what it counts from."""

    event: torch.cuda.Event
    zero: torch.cuda.Event
    origin: float
    """When the zero was, in seconds of the host."""


Stamp = float | TimedEvent


class DeviceClock:
    """Time stamps in seconds, comparable between processes of a host; on CUDA, the time of the stream."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self.start = 0.0
        self.stamp: Callable[[], Stamp] = self.moment if self.cuda else time.perf_counter
        if self.cuda:
            self.renew()

    def renew(self) -> None:
        """Count from here: what the stream calls now is now on the host, too."""
        torch.cuda.synchronize(self.device)
        self.zero, self.origin = self.event(), time.perf_counter()

    def begin(self) -> None:
        """A new step. Now and then it waits for the device, so that the stamps stay precise in a long run."""
        if self.cuda and time.perf_counter() - self.origin > RENEWED:
            self.renew()

    def event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def moment(self) -> TimedEvent:
        return TimedEvent(self.event(), self.zero, self.origin)

    def reached(self, stamp: Stamp) -> bool:
        """Whether the device has come to a stamp, without waiting for it."""
        return not isinstance(stamp, TimedEvent) or stamp.event.query()

    def start_now(self) -> None:
        """Count from here; processes of several hosts call it at the same moment."""
        self.start = time.perf_counter()

    def seconds(self, stamp: Stamp) -> float:
        if isinstance(stamp, TimedEvent):
            stamp.event.synchronize()
            return stamp.origin - self.start + stamp.zero.elapsed_time(stamp.event) / 1e3
        return stamp - self.start
