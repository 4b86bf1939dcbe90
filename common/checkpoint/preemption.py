"""Stop requests: signals set a flag, all ranks vote on it between two steps, save a checkpoint, and stop together.

A stop request is SIGUSR2 (a time limit is near, or SLURM preempts), SIGTERM (a requeue, or a site that preempts without
more) or Ctrl-C. A rank that has not ended within the grace time, or is signalled again, ends at once.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import IO, NamedTuple

import torch
import torch.distributed as dist

from common.core.errors import EXIT_RESUMABLE
from common.core.network import call_with_timeout
from common.core.signals import REPEAT_SECONDS, STOP_SIGNALS
from common.distributed.rendezvous import World
from configs.shared import Checkpoint

POLL_SECONDS = 0.5  # between two votes: an all-reduce each
ANSWER_SECONDS = 5.0  # for an answer of the rendezvous store


class StopRequested(SystemExit):
    """Exit with status 75 after saving: the next attempt resumes the run.

    With `together` all ranks have voted for it. Otherwise each stops where it is, and others may wait for its messages.
    """

    def __init__(self, together: bool = True) -> None:
        super().__init__(EXIT_RESUMABLE)
        self.together = together


class StopRequest:
    """Flag of a stop request. `log` receives the stacks of all threads if this process has to be ended.

    A thread receives the signals: the main one may be blocked in a collective, where no handler of Python runs.
    """

    def __init__(self, grace: float, log: IO[str]) -> None:
        self.grace, self.log = grace, log
        self.number = 0
        self.received = 0.0
        """Time of the first request, by time.monotonic()."""
        self.all_saved = False
        """True while nothing would be lost: the main thread then stops at the next request, wherever it is."""

    def listen(self) -> None:
        """Let signals only set the flag from now on. An ignored SIGINT stays ignored: the launcher forwards it."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        threading.Thread(target=self._listen, args=(reader,), daemon=True, name="stop-request").start()

    def _on_signal(self, number: int, frame: object) -> None:
        if self.all_saved:
            self.all_saved = False  # the same request may come twice
            raise StopRequested(together=False)

    def _listen(self, reader: int) -> None:
        while byte := os.read(reader, 1):
            if byte[0] in STOP_SIGNALS:
                self._receive(byte[0])

    def _receive(self, number: int) -> None:
        now = time.monotonic()
        if not self.number:
            self.number, self.received = number, now
            faulthandler.dump_traceback_later(self.grace, exit=True, file=self.log)
        elif number == signal.SIGINT or now - self.received > REPEAT_SECONDS:
            os._exit(128 + number)

    def wait_for_request(self) -> bool:
        """Wait up to a second for a stop request, which other ranks may receive earlier; return True if one came."""
        deadline = time.monotonic() + 1.0
        while not self.number and time.monotonic() < deadline:
            time.sleep(0.02)
        return bool(self.number)

    def dump_stacks_after(self, seconds: float | None) -> None:
        """Write the stacks of all threads to the log unless this is called within `seconds`; None cancels it."""
        if not self.number and seconds is None:
            faulthandler.cancel_dump_traceback_later()
        elif not self.number and seconds is not None:
            faulthandler.dump_traceback_later(seconds, file=self.log)
        if self.number:  # received just now
            faulthandler.dump_traceback_later(self.grace, exit=True, file=self.log)

    def close(self) -> None:
        """Cancel the dump of stacks."""
        faulthandler.cancel_dump_traceback_later()


def synchronize_exit() -> None:
    """Wait for all ranks before they exit, so that each ends with its own exit status; all ranks call it.

    srun and torchrun end the others as soon as one has ended, and then report a signal.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.barrier()


class Decision(NamedTuple):
    """Result of a vote after a step, the same on all ranks."""

    stop: bool
    save: bool
    diverged: bool


class StopAgreement:
    """Vote of all ranks between steps: whether to save a checkpoint, and whether to stop.

    It costs an all-reduce, so ranks vote only at steps named by the config, and about every POLL_SECONDS by rank 0's
    clock.
    """

    def __init__(self, world: World, settings: Checkpoint, stop_request: StopRequest) -> None:
        self.world, self.settings, self.stop_request = world, settings, stop_request
        self.calls, self.next_call = 0, 1
        self.start(0)

    def start(self, step: int) -> None:
        """Vote from the next step on; the time until the next save begins now."""
        self.next_step = self.last_step = step
        self.voted = self.saved = time.perf_counter()

    def is_due(self, step: int) -> bool:
        """Check whether the ranks vote after this step; the same on all ranks."""
        return step >= self.next_step or self._is_named(step)

    def _is_named(self, step: int) -> bool:
        return bool(self.settings.every_steps) and step % self.settings.every_steps == 0

    def is_stop_requested(self) -> bool:
        """Check whether any rank has a stop request, in work without steps. All ranks call it equally often."""
        self.calls += 1
        if self.calls < self.next_call:
            return False
        count = self._choose_interval(self.calls, time.perf_counter())
        self.calls = 0
        stop, self.next_call = self._reduce_max(bool(self.stop_request.number), self.world.is_main * count)
        return bool(stop)

    def _choose_interval(self, done: int, now: float) -> int:
        """Return the steps or calls until the next vote: POLL_SECONDS of them, at most four times those just done."""
        count = int(done * POLL_SECONDS / max(now - self.voted, 1e-6))
        self.voted = now
        return min(max(1, count), 4 * done)

    def _reduce_max(self, *values: int) -> list[int]:
        """Return the maximum of each value over all ranks."""
        table = torch.tensor(values, dtype=torch.int64, device=self.world.device)
        if self.world.size > 1:
            dist.all_reduce(table, dist.ReduceOp.MAX)
        return table.tolist()

    def vote(self, step: int, diverged: bool) -> Decision:
        """Vote; all ranks call it at the same step. Rank 0's clock and its knowledge of the loss count."""
        now = time.perf_counter()
        following = step + self._choose_interval(max(1, step - self.last_step), now)
        late = 0 < self.settings.every_seconds <= now - self.saved
        main = self.world.is_main
        votes = bool(self.stop_request.number), main and late, main and diverged, main * following
        *answers, self.next_step = self._reduce_max(*votes)
        stop, by_time, diverged = (bool(answer) for answer in answers)
        self.last_step = step
        save = stop or by_time or self._is_named(step)
        if save:
            self.saved = now
        return Decision(stop, save, diverged)


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

    Ranks that wait, too, began to at most `seconds` later, about a step. `part` distinguishes the waits of one run.
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
