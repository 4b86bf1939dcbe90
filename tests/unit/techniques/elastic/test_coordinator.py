"""Coordinator of an elastic run: generations, lost and joining ranks, and invalid connections."""

from __future__ import annotations

import contextlib
import socket

import pytest

from common.techniques.elastic.coordinator import EndReason
from common.techniques.elastic.member import Generation, GenerationEnded
from tests.harness.commands.processes import wait_until
from tests.unit.techniques.elastic.elastic_run import ElasticRun, StartRun


def test_the_source_of_the_state_is_a_rank_with_the_most_steps(start_run: StartRun) -> None:
    run = start_run(4)
    run.kill(1)
    for rank in (0, 3):
        wait_until(lambda rank=rank: run.members[rank].generation_ended, "the ranks know of the loss")  # type: ignore[misc]
    generations = run.sign_in({0: 7, 2: 8, 3: 7})
    for generation in generations.values():
        assert generation.members == [0, 2, 3]
        assert generation.source == 1
        assert generation.copies
        assert generation.number == 2
    assert set(generations) == {0, 2, 3}
    assert generations[0].lost == [1]
    assert not run.members[0].generation_ended


def test_a_loss_while_a_generation_forms_ends_that_generation(start_run: StartRun) -> None:
    """A rank that waits for the address of the lost rank is notified, too."""
    run = start_run(3)
    run.kill(0)
    run.sign_in({1: 3, 2: 3})
    run.members[1].set_value("1", "address")
    assert run.members[1].get_values(["1"]) == ["address"]
    run.kill(2)
    with pytest.raises(GenerationEnded):
        run.members[1].get_values(["2"])
    assert run.sign_in({1: 3})[1] == Generation(3, [1], 0, False, [2], [], False)


def test_an_unresponsive_rank_is_declared_lost_and_leaves(start_run: StartRun) -> None:
    """A frozen rank that continues leaves, whatever it was about to do."""
    run = start_run(2, timeout=0.3)
    frozen = run.members[1]
    frozen.heartbeat_seconds = 3600
    wait_until(lambda: run.unresponsive == [1], "the rank is unresponsive")
    assert run.sign_in({0: 5})[0].members == [0]
    wait_until(lambda: "declared this rank lost" in frozen.leave_reason, "the rank leaves")


def test_a_joining_rank_gets_the_state_of_the_others(start_run: StartRun) -> None:
    """The others continue their generation until all of them know that a rank waits."""
    run = start_run(2)
    run.kill(1)
    run.sign_in({0: 5})
    generations = run.join_rank_1(6)
    assert generations[0] == generations[1] == Generation(3, [0, 1], 0, True, [], [1], False)


def test_the_run_ends_if_no_rank_has_the_complete_state(start_run: StartRun) -> None:
    """The rank that joined belongs to a generation, but its copy of the state was never complete."""
    run = start_run(3)
    run.kill(1)
    run.kill(2)
    assert run.sign_in({0: 5})[0].members == [0]
    generation = run.join_rank_1(6)[1]
    assert generation.members == [0, 1]
    assert generation.source == 0
    run.kill(0)
    run.start_to_sign_in(1, -1)
    wait_until(lambda: run.coordinator.end_reason, "the state is lost")
    assert run.coordinator.end_reason is EndReason.STATE_LOST
    assert run.coordinator.generation_number == generation.number
    assert not run.coordinator.is_active
    assert not run.coordinator.missing_ranks


def test_fewer_ranks_than_the_minimum_stop(start_run: StartRun) -> None:
    run = start_run(3, min=2)
    run.kill(0)
    assert not run.sign_in({1: 3, 2: 3})[1].stops
    run.kill(1)
    assert run.sign_in({2: 3})[2].stops


def test_the_run_ends_without_an_irreplaceable_rank(start_run: StartRun) -> None:
    """The other ranks form no generation, and no rank is restarted: the launcher ends them."""
    run = start_run(4, irreplaceable=2)
    run.kill(3)
    assert run.sign_in({0: 3, 1: 3, 2: 3})[1].members == [0, 1, 2]
    wait_until(lambda: run.started == [3], "rank 3 is started")
    run.kill(1)
    wait_until(lambda: run.coordinator.end_reason, "rank 1 is lost")
    assert not run.coordinator.is_active
    assert not run.supervisor.handle_ended_rank(1, -9)

    for rank in (0, 2):
        run.start_to_sign_in(rank, 4)

    def count_signed_in_ranks() -> int:
        return len([connection for connection in run.coordinator.connections if connection.sign_in])

    wait_until(lambda: count_signed_in_ranks() == 2, "the other ranks sign in")
    assert run.coordinator.generation_number == 2
    assert run.started == [3]


def test_the_loss_of_an_irreplaceable_rank_counts_before_all_ranks_are_connected(start_run: StartRun) -> None:
    run = start_run(3, irreplaceable=1, absent=1)
    run.kill(0)
    wait_until(lambda: run.coordinator.end_reason, "rank 0 is lost")
    run.connect(2)
    assert not run.supervisor.handle_ended_rank(0, -9)
    assert not run.coordinator.is_active


def test_a_rank_that_ends_itself_reports_the_reason(start_run: StartRun) -> None:
    """The rank counts as lost, even if its failure has let it leave in order before."""
    run = start_run(2)
    run.members[1].close()
    wait_until(lambda: run.coordinator.members == [0], "rank 1 leaves")
    assert not run.members[0].generation_ended
    run.members[1]._announce_loss("a collective does not end")
    wait_until(lambda: run.members[0].generation_ended, "rank 0 knows of the loss")
    run.kill(1)
    assert run.sign_in({0: 1})[0].lost == [1]
    assert run.coordinator.reasons == {1: "ended itself: a collective does not end"}


def send_as_stranger(run: ElasticRun, message: bytes) -> None:
    """Send a message on a new connection, and check that the coordinator closes the connection."""
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(30)
        stranger.connect(run.path)
        with contextlib.suppress(OSError):  # the connection may be closed before the whole message is sent
            stranger.sendall(message)
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(1) == b""


def test_invalid_connections_end_no_generation(start_run: StartRun) -> None:
    run = start_run(2)
    for message in (
        b'{"hello": 1, "key": "guess", "joins": true}\n',
        b"[]\n",
        b'{"sign_in": {}}\n',
        b"\xff" * (1 << 21),
    ):
        send_as_stranger(run, message)
    assert not run.members[0].generation_ended
    assert run.coordinator.members == [0, 1]


HELLO = '"joins": false, "irreplaceable": false, "pid": 9'


@pytest.mark.parametrize(
    "message",
    [
        b"[" * 100_000,
        b"[" * 4000 + b"\n",
        b"\xff\n",
        b"17\n",
        b'{"beat": true}\n',
        f'{{"hello": 1, "key": "other", {HELLO}}}\n'.encode(),
        f'{{"hello": 0, "key": "secret", {HELLO}}}\n'.encode(),  # rank 0 is connected already
        b'{"hello": 0, "key": "secret", "joins": false, "irreplaceable": false, "pid": 1e400}\n',
    ],
    ids=["long", "deep", "no text", "a number", "no name", "another key", "a rank twice", "infinite"],
)
def test_an_invalid_message_does_not_disturb_later_generations(start_run: StartRun, message: bytes) -> None:
    run = start_run(2)
    send_as_stranger(run, message)
    run.kill(1)
    assert run.sign_in({0: 3})[0].members == [0]
