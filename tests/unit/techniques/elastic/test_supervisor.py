"""Supervisor of an elastic run: which ranks it restarts, and when."""

from __future__ import annotations

import errno
import os
import time

import pytest

from common.techniques.elastic import supervisor
from tests.harness.commands.processes import wait_until
from tests.unit.techniques.elastic.elastic_run import ElasticRun, StartRun


def wait_for_poll(run: ElasticRun) -> None:
    """Wait until the coordinator has polled its members once more."""
    previous = run.coordinator.polled
    wait_until(lambda: run.coordinator.polled > previous, "the coordinator polls", pause=0.001)


def test_a_missing_rank_is_restarted_only_if_it_is_known_to_be_lost(start_run: StartRun) -> None:
    """The rank may have exited with an error, which ends the run."""
    run = start_run(3)
    run.kill(1)
    run.lost.clear()
    run.sign_in({0: 1, 2: 1})
    for _ in range(3):
        wait_for_poll(run)
    assert not run.started
    run.lost.add(1)
    wait_until(lambda: run.started == [1], "rank 1 is started")


def test_a_rank_that_is_starting_is_not_started_twice(start_run: StartRun) -> None:
    """Another rank is lost before the first one has joined."""
    run = start_run(4)
    run.kill(1)
    run.sign_in({0: 1, 2: 1, 3: 1})
    wait_until(lambda: run.started == [1], "rank 1 is started")
    run.kill(2)
    run.sign_in({0: 1, 3: 1})
    wait_until(lambda: 2 in run.started, "rank 2 is started")
    run.members[1] = run.connect(1, joins=True)
    wait_until(lambda: 1 in run.coordinator.connected_ranks, "rank 1 is connected")
    assert run.started == [1, 2]


def test_a_restarted_rank_that_does_not_connect_is_killed_and_started_again(start_run: StartRun) -> None:
    """For example, a process that is frozen before its first message. Each start counts."""
    run = start_run(2, start_timeout=0.05, rejoin=2)
    run.kill(1)
    run.sign_in({0: 1})
    wait_until(lambda: run.unresponsive == [1, 1], "both new processes are killed")
    assert run.started == [1, 1]
    assert not run.supervisor.start_times
    assert run.coordinator.is_active


def test_a_rank_that_cannot_be_started_is_started_later(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other ranks continue. Each attempt counts."""
    monkeypatch.setattr(supervisor, "RETRY_SECONDS", 0.05)
    run = start_run(2, rejoin=2)
    start_times: list[float] = []

    def start(rank: int) -> None:
        start_times.append(time.monotonic())
        if len(start_times) == 1:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        run.started.append(rank)

    monkeypatch.setattr(run.supervisor, "start", start)
    run.kill(1)
    run.sign_in({0: 1})
    wait_until(lambda: run.started == [1], "rank 1 is started")
    assert run.supervisor.restarts[1] == 2
    assert start_times[1] - start_times[0] >= 0.05 - supervisor.POLL_SECONDS
    problem = "rank 1 could not be restarted (restart 1 of 2): Resource temporarily unavailable\n"
    assert capsys.readouterr().out == problem
