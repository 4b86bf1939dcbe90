"""After which steps a run saves, by the clock of rank 0."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

import pytest
import torch

from common.checkpoint.save_or_stop_vote import SaveOrStopVote
from common.checkpoint.stop_request import StopRequest
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from configs.shared import Checkpoint
from tests.harness.processes import wait_until


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def make_vote(settings: Checkpoint) -> SaveOrStopVote:
    world = World(hosts=("here",), device=torch.device("cpu"), backend="gloo", threads=1)
    return SaveOrStopVote(Ranks(world), settings, StopRequest(60, sys.stderr))


def test_the_clock_of_saving_begins_anew_with_each_save_and_not_with_each_look(clock: list[float]) -> None:
    vote = make_vote(Checkpoint(every_seconds=10))
    vote.start_votes_after(0)
    saved = []
    for step in range(1, 13):
        clock[0] += 4
        if vote.vote_after_step(step, False, clock[0]).save:
            saved.append(step)
    assert saved == [3, 6, 9, 12]


def test_looks_are_as_seldom_as_half_a_second_and_at_most_four_times_further_apart(clock: list[float]) -> None:
    vote = make_vote(Checkpoint(every_seconds=0))
    vote.start_votes_after(0)
    looked = []
    for step in range(1, 101):
        clock[0] += 0.05
        if vote.is_vote_due(step):
            vote.vote_after_step(step, False, clock[0])
            looked.append(step)
    assert looked[:3] == [1, 5, 15] and all(b - a == 10 for a, b in itertools.pairwise(looked[2:]))


def test_looks_are_more_seldom_where_ranks_wait_long_for_each_other(clock: list[float]) -> None:
    def list_gaps(wait: float) -> list[int]:
        vote, looked = make_vote(Checkpoint(every_seconds=0)), []
        for step in range(1, 401):
            clock[0] += 0.05
            if vote.is_vote_due(step):
                came = clock[0]
                clock[0] += wait
                vote.vote_after_step(step, False, came)
                looked.append(step)
        return [b - a for a, b in itertools.pairwise(looked)][5:]

    assert set(list_gaps(0.02)) <= {9, 10}  # a wait of 4 % of half a second
    assert all(22 <= gap <= 28 for gap in list_gaps(0.07))  # 5 % of 1.4 s
    assert all(30 <= gap <= 40 for gap in list_gaps(0.3))  # never over 2 s apart


def test_work_without_steps_looks_about_twice_a_second(clock: list[float]) -> None:
    vote = make_vote(Checkpoint())
    heard = []
    for call in range(1, 101):
        clock[0] += 0.05
        if call == 40:
            vote.stop_request.signal_number = 12
        if vote.vote_in_evaluation(lambda: "").stop:
            heard.append(call)
    assert heard and 40 <= heard[0] <= 50


def test_no_stacks_are_written_once_the_watch_has_ended(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w+") as log:
        request = StopRequest(60, log)
        request.dump_stacks_after(0.05)
        wait_until(lambda: "Timeout" in (tmp_path / "log").read_text(), "the stacks are written")
        request.dump_stacks_after(0.05)
        request.dump_stacks_after(None)
        log.truncate(0)
        time.sleep(0.2)
        assert not (tmp_path / "log").read_text()
        request.cancel_watchdog()
