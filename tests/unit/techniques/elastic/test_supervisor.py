"""Supervisor of an elastic run: which ranks it restarts, and when."""

from __future__ import annotations

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
