"""Detection of unresponsive ranks.

Unresponsive ranks are detected through the rendezvous store, which still works after collectives have failed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.system.network import call_with_timeout

ANSWER_SECONDS = 5.0  # time limit for an answer from the rendezvous store


class SilentRankWatchdog:
    """Watchdog that reports which ranks a blocked collective is waiting for.

    The watchdog is needed if a collective does not raise a timeout. With NCCL, the calling thread is blocked in the GPU
    driver until torch's NCCL watchdog ends the process, and that watchdog does not name the ranks.
    """

    def __init__(
        self, ranks: Ranks, timeout_seconds: float, step_seconds: float, report: Callable[[str], None]
    ) -> None:
        """Start a thread that calls `report` once if `restart_time_limit` is not called for `timeout_seconds`.

        `report` receives a message that names the unresponsive ranks. `step_seconds` is the approximate duration of a
        step.
        """
        self.ranks = ranks
        self.timeout_seconds = timeout_seconds
        self.step_seconds = step_seconds
        self.report = report
        self.closed = threading.Event()
        self.round = 0
        self.restart_time_limit()
        threading.Thread(target=self._watch, daemon=True, name="silence").start()

    def restart_time_limit(self) -> None:
        """Restart the time limit after a step. All ranks must call this method the same number of times."""
        self.round += 1
        self.deadline = time.monotonic() + self.timeout_seconds

    def close(self) -> None:
        """Stop the watchdog."""
        self.closed.set()

    def _watch(self) -> None:
        while not self.closed.wait(max(0.0, self.deadline - time.monotonic())):
            if time.monotonic() < self.deadline:
                continue
            message = describe_silent_ranks(self.ranks.current, self.step_seconds, f"{self.round}/")
            if message:
                if not self.closed.is_set():
                    self.report(message)
                return
            self.deadline = time.monotonic() + self.timeout_seconds  # all ranks are waiting for a slow operation


def describe_silent_ranks(world: World, step_seconds: float, part: str = "") -> str:
    """Return a message that names the ranks that have not reached the collective that timed out.

    The message is empty if all ranks are waiting. A rank counts as waiting if it calls this function within
    `step_seconds` of the call on this rank. `part` must differ between calls in one run, because it is part of the
    store's keys. This function does not call any collective.
    """
    store = world.store
    if store is None:
        return ""

    def list_silent_ranks() -> list[int]:
        store.set(f"waited/{part}{world.rank}", "")
        time.sleep(step_seconds)  # the other ranks time out in this interval
        return [rank for rank in range(world.size) if not store.check([f"waited/{part}{rank}"])]

    silent = None
    with contextlib.suppress(RuntimeError, dist.DistError):
        # If the process that serves the store hangs, calls block forever despite the store's own timeout.
        silent = call_with_timeout(step_seconds + ANSWER_SECONDS, list_silent_ranks)
    if silent is None:
        return f"rank 0 on {world.hosts[0]}, which serves the rendezvous store, does not answer"
    if not silent:
        return ""
    names = ", ".join(f"rank {rank} on {world.hosts[rank]}" for rank in silent)
    return f"{names} did not answer within {world.timeout.total_seconds():g} s; check the log of each unresponsive rank"
