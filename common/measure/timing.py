"""Wall-clock time of calls, with the device's work in it."""

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
    """Return the seconds of each of `repeats` calls, from the call until the device has finished its work.

    The first `warm_up` calls are left out. `prepare` runs before each call and is not timed, such as a barrier. After
    `budget` seconds no further call is made, but one call is always timed.
    """
    times: list[float] = []
    began = time.perf_counter()
    for number in range(-warm_up, repeats):
        if number > 0 and time.perf_counter() - began >= budget:
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
    """Wait until the device has done all work queued on it; returns at once for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
