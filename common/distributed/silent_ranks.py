"""Detection of ranks that do not answer.

It uses the rendezvous store, which works after collectives have failed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from common.core.network import call_with_timeout
from common.distributed.rendezvous import World

ANSWER_SECONDS = 5.0  # time limit of an answer of the rendezvous store


class SilenceWatch:
    """Watchdog that names the ranks a collective waits for without raising a timeout.

    With NCCL that thread is blocked in the GPU driver until NCCL's own watchdog ends the process without naming a rank.
    """

    def __init__(
        self, world: World, timeout_seconds: float, step_seconds: float, report: Callable[[str], None]
    ) -> None:
        """Call `report` once, in a thread, when `timeout_seconds` have passed without `restart`.

        A step takes about `step_seconds`.
        """
        self.world = world
        self.timeout_seconds = timeout_seconds
        self.step_seconds = step_seconds
        self.report = report
        self.closed = threading.Event()
        self.round = 0
        self.restart()
        threading.Thread(target=self._watch, daemon=True, name="silence").start()

    def restart(self) -> None:
        """Restart the time limit after a step. All ranks call it equally often."""
        self.round += 1
        self.deadline = time.monotonic() + self.timeout_seconds

    def close(self) -> None:
        """Stop the watchdog."""
        self.closed.set()

    def _watch(self) -> None:
        while not self.closed.wait(max(0.0, self.deadline - time.monotonic())):
            if time.monotonic() < self.deadline:
                continue
            message = name_silent_ranks(self.world, self.step_seconds, f"{self.round}/")
            if message:
                if not self.closed.is_set():
                    self.report(message)
                return
            self.deadline = time.monotonic() + self.timeout_seconds  # all ranks wait: the operation is slow


def name_silent_ranks(world: World, step_seconds: float, part: str = "") -> str:
    """Return a message naming the ranks that are not in the collective that timed out.

    It is empty if all ranks wait. A rank waits if it calls this function within `step_seconds` of this rank. `part`
    distinguishes the calls of one run. Uses no collective.
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
    return f"{names} did not answer within {world.timeout.total_seconds():g} s; see the log of that rank"
