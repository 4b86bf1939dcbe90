"""The decision after a step whether a checkpoint is written, and whether the run stops: a vote of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from common.checkpoint.stop_request import StopRequest
from common.distributed.rendezvous import World
from configs.shared import Checkpoint

POLL_SECONDS = 0.5  # between two votes: an all-reduce each
LONGEST_POLL_SECONDS = 2.0  # where ranks wait for each other at a vote
WAIT_SHARE = 0.05  # of the time, at most, that a rank may wait at votes


class Decision(NamedTuple):
    """Result of a vote after a step, the same on all ranks."""

    stop: bool
    save: bool
    diverged: bool
    lost: bool = False
    """True where another attempt has the run, or the attempt's folder is gone."""


class SaveOrStopVote:
    """Vote of all ranks between steps: whether to save a checkpoint, and whether to stop. `Saver` does what it decides.

    It costs an all-reduce, so ranks vote only after every `checkpoint.every_steps` steps, and about every POLL_SECONDS
    by rank 0's clock; more seldom where a rank waits long for the others, up to LONGEST_POLL_SECONDS.
    """

    def __init__(self, world: World, settings: Checkpoint, stop_request: StopRequest) -> None:
        self.world, self.settings, self.stop_request = world, settings, stop_request
        self.begin_after(0)

    def begin_after(self, step: int) -> None:
        """Vote from the step after this one on; the time until the next save begins now."""
        self.restart_after(step)
        self.saved = self.voted

    def restart_after(self, step: int) -> None:
        """Vote from the step after this one on, and at the next call in work without steps, on all ranks alike."""
        self.next_step = self.last_step = step
        self.calls, self.next_call = 0, 1
        self.voted = time.perf_counter()
        self.waited = self.own_wait = 0.0

    def is_due(self, step: int) -> bool:
        """Check whether the ranks vote after this step; the same on all ranks."""
        return step >= self.next_step or self._is_save_step(step)

    def _is_save_step(self, step: int) -> bool:
        return bool(self.settings.every_steps) and step % self.settings.every_steps == 0

    def vote_in_evaluation(self, find_loss: Callable[[], str]) -> Decision:
        """Decide by a vote whether to stop, in work without steps. All ranks call it equally often.

        `find_loss` says on rank 0 why the attempt must stop; it is called only where the ranks vote.
        """
        self.calls += 1
        if self.calls < self.next_call:
            return Decision(stop=False, save=False, diverged=False)
        count = self._choose_interval(self.calls, time.perf_counter())
        self.calls = 0
        is_lost = self.world.is_main and bool(find_loss())
        has_request = bool(self.stop_request.number)
        stop, lost, self.next_call = self._reduce_max(has_request, is_lost, self.world.is_main * count)
        return Decision(bool(stop), False, False, bool(lost))

    def _choose_interval(self, done: int, now: float) -> int:
        """Return the steps or calls until the next vote, at most four times those just done."""
        seconds = min(max(POLL_SECONDS, self.waited / WAIT_SHARE), LONGEST_POLL_SECONDS)
        count = int(done * seconds / max(now - self.voted, 1e-6))
        self.voted = now
        return min(max(1, count), 4 * done)

    def _reduce_max(self, *values: int) -> list[int]:
        """Return the maximum of each value over all ranks."""
        table = torch.tensor(values, dtype=torch.int64, device=self.world.device)
        if self.world.size > 1:
            dist.all_reduce(table, dist.ReduceOp.MAX)
        return table.tolist()

    def decide(self, step: int, diverged: bool, came: float, *, lost: bool = False) -> Decision:
        """Decide by a vote; all ranks call it after the same step. Rank 0's clock, loss and view of the folder count.

        `came` is when this rank began to wait for the others, by time.perf_counter().
        """
        now = time.perf_counter()
        following = step + self._choose_interval(max(1, step - self.last_step), now)
        late = 0 < self.settings.every_seconds <= now - self.saved
        main = self.world.is_main
        votes = bool(self.stop_request.number), main and late, main and diverged, main and lost, main * following
        *answers, self.next_step, waited = self._reduce_max(*votes, int(1e6 * self.own_wait))
        self.waited, self.own_wait = waited / 1e6, time.perf_counter() - came
        stop, by_time, diverged, lost = (bool(answer) for answer in answers)
        self.last_step = step
        save = stop or by_time or self._is_save_step(step)
        if save:
            self.saved = now
        return Decision(stop, save, diverged, lost)
