"""Sending messages to another rank: over TCP, over TLS, and through shared memory."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.ranks.links.connecting import RankLinks
from common.ranks.links.outgoing import LinkTimeout
from common.ranks.links.socket_stream import PIECE_BYTES, SMALL_BYTES
from tests.harness.commands.processes import WAIT_TIMEOUT
from tests.harness.ranks.folder_rendezvous import LARGE_BYTES, FolderRendezvous, fork

MESSAGE_BYTES = (0, 1, 4, SMALL_BYTES, SMALL_BYTES + 1, PIECE_BYTES, LARGE_BYTES)


def test_messages_of_every_size_arrive_and_are_counted(connected_ranks: list[RankLinks]) -> None:
    sender = connected_ranks[0].outgoing[1]
    receiver = connected_ranks[1].incoming[0]
    for tag, size in enumerate(MESSAGE_BYTES):
        message = os.urandom(size)
        received = bytearray(size)
        ticket = sender.send(tag, message)
        receiver.receive(tag, received)
        sender.wait_until_written(ticket)
        assert received == message, size

        sender.send(tag, message)
        pieces = [bytes(piece) for piece in receiver.receive_pieces(tag, size)]
        assert b"".join(pieces) == message, size
    assert sender.bytes_sent == 2 * sum(MESSAGE_BYTES)


def test_all_ranks_may_send_before_any_rank_receives(connected_ranks: list[RankLinks]) -> None:
    def exchange(rank: int) -> bool:
        sender = connected_ranks[rank].outgoing[1 - rank]
        receiver = connected_ranks[rank].incoming[1 - rank]
        tickets = [sender.send(0, os.urandom(LARGE_BYTES))]
        small = bytearray(SMALL_BYTES)
        for number in range(300):
            small[:2] = number.to_bytes(2)  # a buffer may be changed as soon as `send` returns
            tickets.append(sender.send(1, small))

        receiver.receive(0, bytearray(LARGE_BYTES))
        for number in range(300):
            receiver.receive(1, small)
            assert small[:2] == number.to_bytes(2)
        for ticket in tickets:
            sender.wait_until_written(ticket)
        return True

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(exchange, (0, 1))) == [True, True]


def test_a_small_message_that_waits_is_a_copy(connected_ranks: list[RankLinks]) -> None:
    """A message waits if all slots of the shared memory are occupied, or if the buffer of the socket is full."""
    sender = connected_ranks[0].outgoing[1]
    receiver = connected_ranks[1].incoming[0]
    message = bytearray(SMALL_BYTES)
    tickets = []
    for number in range(200):
        message[:] = bytes([number]) * SMALL_BYTES
        tickets.append(sender.send(number, message))
    with pytest.raises(LinkTimeout):
        sender.wait_until_written(tickets[-1], 0.01)

    for number in range(200):
        received = bytearray(SMALL_BYTES)
        receiver.receive(number, received)
        assert received == bytes([number]) * SMALL_BYTES, number
    sender.wait_until_written(tickets[-1])


def test_the_last_message_of_a_rank_arrives_after_its_exit(rendezvous: FolderRendezvous) -> None:
    message = b"x" * SMALL_BYTES * 3

    def send_and_exit() -> None:
        links = rendezvous.join(1, 2)
        ticket = links.outgoing[0].send(0, message)
        links.outgoing[0].wait_until_written(ticket)
        links.close()

    process = fork(send_and_exit)
    links = rendezvous.join(0, 2)
    process.join(WAIT_TIMEOUT)
    received = bytearray(len(message))
    links.incoming[1].receive(0, received)
    assert received == message


def test_a_silent_rank_is_named_after_the_time_limit(rendezvous: FolderRendezvous) -> None:
    ranks = rendezvous.join_all(2, timeout=0.2)
    ticket = ranks[0].outgoing[1].send(0, bytes(20 * LARGE_BYTES))
    message = r"rank 1 does not answer \(no progress for 0.2 s\); see its log, or raise launch.step_timeout"
    with pytest.raises(LinkTimeout, match=message):
        ranks[0].incoming[1].receive(0, bytearray(4))
    with pytest.raises(LinkTimeout, match=message):
        ranks[0].outgoing[1].wait_until_written(ticket)
