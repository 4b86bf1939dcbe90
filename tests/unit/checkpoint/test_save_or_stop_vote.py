"""After which steps ranks vote and a run saves."""

from __future__ import annotations

import itertools
import sys
import time

import pytest
import torch

from common.checkpoint.save_or_stop_vote import Ballot, SaveOrStopVote
from common.checkpoint.stop_request import StopRequest
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from configs.shared import Checkpoint


class Clock:
    """Clock that replaces `time.perf_counter`."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def read(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock.read)
    return clock


def make_vote(settings: Checkpoint, rank: int = 0) -> SaveOrStopVote:
    world = World(rank=rank, hosts=("here",), device=torch.device("cpu"), backend="gloo", threads=1)
    vote = SaveOrStopVote(Ranks(world), settings, StopRequest(60, sys.stderr))
    vote.start_votes_after(0)
    return vote


def raise_connection_error(*_: object) -> Ballot:
    raise RuntimeError("connection closed by peer")


def list_vote_steps(clock: Clock, steps: int, waiting_seconds: float) -> list[int]:
    """Return the steps with a vote, if a step takes 0.05 s and each vote waits for another rank."""
    vote = make_vote(Checkpoint(every_seconds=0))
    vote_steps = []
    for step in range(1, steps + 1):
        clock.seconds += 0.05
        if vote.is_vote_due(step):
            start = clock.seconds
            clock.seconds += waiting_seconds
            vote.vote_after_step(step, False, start)
            vote_steps.append(step)
    return vote_steps


def compute_gaps(steps: list[int]) -> list[int]:
    return [later - earlier for earlier, later in itertools.pairwise(steps)]


def test_the_saving_interval_starts_again_with_each_save_and_not_with_each_vote(clock: Clock) -> None:
    vote = make_vote(Checkpoint(every_seconds=10))
    saved_steps = []
    for step in range(1, 13):
        clock.seconds += 4
        if vote.vote_after_step(step, False, clock.seconds).save:
            saved_steps.append(step)
            vote.finish_save()
    assert saved_steps == [3, 6, 9, 12]


def test_every_rank_votes_to_save_when_its_own_interval_ends(clock: Clock) -> None:
    """Rank 0 may have been restarted, so its interval may end later."""
    vote = make_vote(Checkpoint(every_seconds=10), rank=1)
    clock.seconds += 9
    assert not vote.vote_after_step(1, False, clock.seconds).save
    clock.seconds += 1
    assert vote.vote_after_step(2, False, clock.seconds).save


@pytest.mark.parametrize("settings", [Checkpoint(every_seconds=10), Checkpoint(every_seconds=0, every_steps=4)])
def test_a_save_is_repeated_after_the_next_step_if_a_rank_is_lost(
    settings: Checkpoint, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the vote on the save, and then while the checkpoint is saved."""
    vote = make_vote(settings)
    clock.seconds += 10
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(Ballot, "reduce_max", raise_connection_error)
        vote.vote_after_step(4, False, clock.seconds)
    vote.restart_votes_after(4)
    assert vote.is_vote_due(5)
    assert vote.vote_after_step(5, False, clock.seconds).save
    vote.restart_votes_after(5)
    assert vote.is_vote_due(6)
    assert vote.vote_after_step(6, False, clock.seconds).save
    vote.finish_save()
    assert not vote.vote_after_step(7, False, clock.seconds).save


def test_votes_are_half_a_second_apart_and_the_interval_at_most_quadruples(clock: Clock) -> None:
    vote_steps = list_vote_steps(clock, 100, waiting_seconds=0)
    assert vote_steps[:3] == [1, 5, 15]
    assert set(compute_gaps(vote_steps[2:])) == {10}


GAPS_BY_WAIT = [
    (0.02, 9, 10),  # a wait of 4 % of half a second
    (0.07, 22, 28),  # 5 % of 1.4 s
    (0.3, 30, 40),  # at most 2 s apart
]


@pytest.mark.parametrize("waiting_seconds, min_gap, max_gap", GAPS_BY_WAIT)
def test_votes_are_rarer_if_ranks_wait_long_for_each_other(
    clock: Clock, waiting_seconds: float, min_gap: int, max_gap: int
) -> None:
    gaps = compute_gaps(list_vote_steps(clock, 400, waiting_seconds))[5:]
    assert min_gap <= min(gaps)
    assert max(gaps) <= max_gap


def test_an_evaluation_votes_about_twice_a_second(clock: Clock) -> None:
    vote = make_vote(Checkpoint())
    stop_calls = []
    for call in range(1, 101):
        clock.seconds += 0.05
        if call == 40:
            vote.stop_request.signal_number = 12
        if vote.vote_in_evaluation(lambda: "").stop:
            stop_calls.append(call)
    assert 40 <= stop_calls[0] <= 50
