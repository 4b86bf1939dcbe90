"""Ranks that do not answer: found through the rendezvous store, which works when collectives no longer do."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from common.core.network import call_with_timeout
from common.distributed.rendezvous import World

ANSWER_SECONDS = 5.0  # for an answer of the rendezvous store


class SilenceWatch:
    """Watchdog that names the ranks a collective waits for where no time-out is raised in the waiting thread.

    With NCCL that thread is blocked in the GPU's driver until NCCL's own watchdog ends the process and names no rank.
    """

    def __init__(self, world: World, seconds: float, step: float, tell: Callable[[str], None]) -> None:
        """Call `tell` once, in a thread, after `seconds` without `restart`; a step takes about `step` seconds."""
        self.world, self.seconds, self.step, self.tell = world, seconds, step, tell
        self.closed, self.round = threading.Event(), 0
        self.restart()
        threading.Thread(target=self._wait, daemon=True, name="silence").start()

    def restart(self) -> None:
        """Start the time limit anew after a step; all ranks call it equally often."""
        self.round += 1
        self.deadline = time.monotonic() + self.seconds

    def close(self) -> None:
        """End the watch."""
        self.closed.set()

    def _wait(self) -> None:
        while not self.closed.wait(max(0.0, self.deadline - time.monotonic())):
            if time.monotonic() < self.deadline:
                continue
            words = name_silent_ranks(self.world, self.step, f"{self.round}/")
            if words and not self.closed.is_set():
                self.tell(words)
            if words:
                return
            self.deadline = time.monotonic() + self.seconds  # all wait, for what takes long


def name_silent_ranks(world: World, seconds: float, part: str = "") -> str:
    """Name the ranks that do not wait, too, after a collective timed out; empty if all wait. Uses no collective.

    A rank counts as waiting if it began to wait within `seconds`, about a step, of this one. `part` distinguishes the
    waits of one run.
    """
    store = world.store
    if store is None:
        return ""

    def find_silent() -> list[int]:
        store.set(f"waited/{part}{world.rank}", "")
        time.sleep(seconds)  # the others' time runs out about now
        return [rank for rank in range(world.size) if not store.check([f"waited/{part}{rank}"])]

    silent = None
    with contextlib.suppress(RuntimeError, dist.DistError):
        # a store whose process stands still lets its callers wait for ever, whatever its own time limit
        silent = call_with_timeout(seconds + ANSWER_SECONDS, find_silent)
    if silent is None:
        return f"rank 0 on {world.hosts[0]}, which serves the rendezvous store, does not answer"
    if not silent:
        return ""
    who = ", ".join(f"rank {rank} on {world.hosts[rank]}" for rank in silent)
    return f"{who} did not answer within {world.timeout.total_seconds():g} s; its log shows where it stands"
