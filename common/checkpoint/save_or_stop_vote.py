"""The vote in which all ranks decide after a step whether to save a checkpoint and whether to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from common.checkpoint.stop_request import StopRequest
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from configs.shared import Checkpoint

POLL_SECONDS = 0.5  # usual time between two votes; a vote costs one all-reduce
MAX_POLL_SECONDS = 2.0  # longest time between two votes, used if ranks wait a long time for each other
MAX_WAIT_SHARE = 0.05  # maximum fraction of its time that a rank should spend waiting at votes


class Decision(NamedTuple):
    """Result of a vote, which is the same on all ranks."""

    stop: bool
    save: bool
    diverged: bool
    run_taken: bool = False
    """True if another attempt has taken over the run, or the attempt's folder was deleted."""


class Ballot(NamedTuple):
    """Votes of one rank. The result of a vote is the maximum of each field over the ballots of all ranks."""

    stop: int
    save: int = 0
    diverged: int = 0
    run_taken: int = 0
    next_vote: int = 0
    """The step after which the ranks vote next. During an evaluation, `next_vote` is the number of calls of
    `vote_in_evaluation` until the next vote."""
    wait_us: int = 0
    """Time in microseconds that this rank waited for other ranks at the previous vote."""

    def reduce_max(self, world: World) -> Ballot:
        """Return a ballot with the maximum of each field over all ranks. All ranks must call this method."""
        table = torch.tensor(self, dtype=torch.int64, device=world.device)
        if world.size > 1:
            dist.all_reduce(table, dist.ReduceOp.MAX)
        return Ballot(*table.tolist())


class SaveOrStopVote:
    """Vote of all ranks, between two steps, on saving a checkpoint and on stopping the run.

    This class only determines the decision. The class `Saver` then saves the checkpoint or stops the run. A vote costs
    an all-reduce, so the ranks do not vote after every step. The ranks vote every `checkpoint.every_steps` steps, and
    about every POLL_SECONDS by rank 0's clock. If a rank waits a long time for other ranks at a vote, the time between
    two votes grows up to MAX_POLL_SECONDS.
    """

    def __init__(self, ranks: Ranks, settings: Checkpoint, stop_request: StopRequest) -> None:
        self.ranks = ranks
        self.settings = settings
        self.stop_request = stop_request
        self.is_save_pending = False
        """True if this rank votes to save, from when a save is due until `finish_save` is called."""
        self.start_votes_after(0)

    def start_votes_after(self, step: int) -> None:
        """Start voting with the step after `step`, and start the timer for the next save now."""
        self.restart_votes_after(step)
        self.saved_at = self.voted_at

    def restart_votes_after(self, step: int) -> None:
        """Start voting again with the step after `step`, or with the next call of `vote_in_evaluation`.

        All ranks must call this method with the same step.
        """
        self.next_step = step
        self.last_step = step
        self.calls = 0
        self.next_call = 1
        self.voted_at = time.perf_counter()
        self.local_wait = 0.0  # seconds that this rank waited at the previous vote
        self.max_wait = 0.0  # longest wait of any rank in seconds, at the vote before the previous one

    def is_vote_due(self, step: int) -> bool:
        """Return True if the ranks must vote after this step. The result is the same on all ranks."""
        return step >= self.next_step or self._is_save_step(step)

    def _is_save_step(self, step: int) -> bool:
        """Return True if `checkpoint.every_steps` requires a checkpoint after this step."""
        return bool(self.settings.every_steps) and step % self.settings.every_steps == 0

    def vote_in_evaluation(self, find_stop_reason: Callable[[], str]) -> Decision:
        """Vote during an evaluation on whether to stop, and return the decision.

        All ranks must call this method the same number of times. Most calls return immediately without a vote. In a
        vote, rank 0 calls `find_stop_reason`, which returns the reason why the attempt must stop, or an empty string.
        """
        self.calls += 1
        if self.calls < self.next_call:
            return Decision(stop=False, save=False, diverged=False)
        ballot = Ballot(stop=bool(self.stop_request.signal_number))
        interval = self._choose_interval(self.calls, time.perf_counter())
        if self.ranks.current.is_main:
            ballot = ballot._replace(run_taken=bool(find_stop_reason()), next_vote=interval)
        outcome = ballot.reduce_max(self.ranks.current)
        self.calls = 0
        self.next_call = outcome.next_vote
        return Decision(bool(outcome.stop), save=False, diverged=False, run_taken=bool(outcome.run_taken))

    def _choose_interval(self, count: int, now: float) -> int:
        """Return the number of steps or calls until the next vote.

        `count` is the number of steps or calls since the previous vote. The result is at most `4 * count`.
        """
        # If ranks have waited for a long time, vote less often: waiting should not exceed MAX_WAIT_SHARE of the time.
        seconds = min(max(POLL_SECONDS, self.max_wait / MAX_WAIT_SHARE), MAX_POLL_SECONDS)
        interval = int(count * seconds / max(now - self.voted_at, 1e-6))
        self.voted_at = now
        return min(max(1, interval), 4 * count)

    def vote_after_step(self, step: int, diverged: bool, wait_start: float, *, run_taken: bool = False) -> Decision:
        """Vote after a step on saving and stopping, and return the decision.

        All ranks must call this method. `diverged` and `run_taken` are used on rank 0 only. `wait_start` is the
        time.perf_counter() value at which this rank started to wait for the other ranks.
        """
        now = time.perf_counter()
        if self._is_save_step(step) or 0 < self.settings.every_seconds <= now - self.saved_at:
            self.is_save_pending = True
        next_step = step + self._choose_interval(max(1, step - self.last_step), now)
        # All ranks vote on saving, because rank 0 may be a new process that does not know when the run was last saved.
        stop = bool(self.stop_request.signal_number)
        ballot = Ballot(stop, self.is_save_pending, wait_us=int(1e6 * self.local_wait))
        if self.ranks.current.is_main:
            ballot = ballot._replace(diverged=diverged, run_taken=run_taken, next_vote=next_step)
        outcome = ballot.reduce_max(self.ranks.current)

        self.max_wait = outcome.wait_us / 1e6
        self.local_wait = time.perf_counter() - wait_start
        self.next_step = outcome.next_vote
        self.last_step = step
        save = bool(outcome.stop or outcome.save)
        if save:
            self.saved_at = now
        self.is_save_pending = save
        return Decision(bool(outcome.stop), save, bool(outcome.diverged), bool(outcome.run_taken))

    def finish_save(self) -> None:
        """Record that a decision to save was executed. Otherwise, the next vote decides to save again."""
        self.is_save_pending = False
