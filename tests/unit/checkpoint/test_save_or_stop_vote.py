"""After which steps ranks vote and a run saves, by the clock of rank 0."""

from __future__ import annotations

import itertools
import sys
import time

import pytest
import torch

from common.checkpoint.save_or_stop_vote import SaveOrStopVote
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


def make_vote(every_seconds: float) -> SaveOrStopVote:
    world = World(hosts=("here",), device=torch.device("cpu"), backend="gloo", threads=1)
    vote = SaveOrStopVote(Ranks(world), Checkpoint(every_seconds=every_seconds), StopRequest(60, sys.stderr))
    vote.start_votes_after(0)
    return vote


def list_vote_steps(clock: Clock, steps: int, waiting_seconds: float) -> list[int]:
    """Return the steps with a vote, if a step takes 0.05 s and each vote waits for another rank."""
    vote = make_vote(every_seconds=0)
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
    vote = make_vote(every_seconds=10)
    saved_steps = []
    for step in range(1, 13):
        clock.seconds += 4
        if vote.vote_after_step(step, False, clock.seconds).save:
            saved_steps.append(step)
    assert saved_steps == [3, 6, 9, 12]


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
    vote = make_vote(every_seconds=Checkpoint().every_seconds)
    stop_calls = []
    for call in range(1, 101):
        clock.seconds += 0.05
        if call == 40:
            vote.stop_request.signal_number = 12
        if vote.vote_in_evaluation(lambda: "").stop:
            stop_calls.append(call)
    assert 40 <= stop_calls[0] <= 50
