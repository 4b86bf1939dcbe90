"""Measurement of the wall-clock time of function calls, including queued work on a device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch


def time_calls(
    call: Callable[[], object],
    device: torch.device,
    repeats: int,
    *,
    warm_up: int = 1,
    prepare: Callable[[], object] | None = None,
    budget: float = math.inf,
) -> list[float]:
    """Time `repeats` calls of a function, and return the durations in seconds.

    A duration includes the work that the call queues on the device. Before the timed calls, the function is called
    `warm_up` times. The function `prepare`, such as a barrier, is called before each call and is not timed. After
    `budget` seconds, no more calls are made, but at least one call is timed.
    """
    times: list[float] = []
    time_limit = time.perf_counter() + budget
    for number in range(-warm_up, repeats):  # negative numbers are calls that are not timed
        if number > 0 and time.perf_counter() >= time_limit:
            break
        if prepare is not None:
            prepare()
            synchronize_device(device)
        start = time.perf_counter()
        call()
        synchronize_device(device)
        if number >= 0:
            times.append(time.perf_counter() - start)
    return times


def synchronize_device(device: torch.device) -> None:
    """Wait until a GPU has finished all queued work. On a CPU, do nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
