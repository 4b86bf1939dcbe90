"""Receiving messages of another rank: over TCP, over TLS, and through shared memory."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.ranks.links.connecting import RankLinks
from common.ranks.links.outgoing import LinkError
from common.ranks.links.socket_stream import SMALL_BYTES
from tests.harness.commands.processes import WAIT_TIMEOUT
from tests.harness.ranks.folder_rendezvous import LARGE_BYTES, FolderRendezvous


def test_messages_are_stored_until_their_tag_is_received(connected_ranks: list[RankLinks]) -> None:
    sender = connected_ranks[0].outgoing[1]
    receiver = connected_ranks[1].incoming[0]
    for tag in (1, 2, 3, 2):
        sender.send(tag, bytes([tag]) * SMALL_BYTES * tag)
    for tag in (2, 3, 2, 1):
        for piece in receiver.receive_pieces(tag, SMALL_BYTES * tag):
            assert bytes(piece) == bytes([tag]) * len(piece)


def test_several_threads_may_wait_for_different_tags(connected_ranks: list[RankLinks]) -> None:
    sender = connected_ranks[0].outgoing[1]
    receiver = connected_ranks[1].incoming[0]
    buffers = [bytearray(LARGE_BYTES) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(receiver.receive, tag, buffer) for tag, buffer in enumerate(buffers)]
        for tag in (3, 1, 0, 2):
            sender.send(tag, bytes([tag]) * LARGE_BYTES)
        for future in futures:
            future.result(WAIT_TIMEOUT)
    assert [set(buffer) for buffer in buffers] == [{0}, {1}, {2}, {3}]


def test_a_patient_receiver_waits_longer_than_the_time_limit(rendezvous: FolderRendezvous) -> None:
    ranks = rendezvous.join_all(2, timeout=0.1)
    sender = ranks[1].outgoing[0]
    receiver = ranks[0].incoming[1]
    buffers = [bytearray(4), bytearray(4)]
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(receiver.receive, tag, buffer, patient=True) for tag, buffer in enumerate(buffers)]
        time.sleep(0.3)
        for tag in (1, 0):
            sender.send(tag, bytes([tag]) * 4)
        for future in futures:
            future.result(WAIT_TIMEOUT)
    assert buffers == [b"\0\0\0\0", b"\1\1\1\1"]


def test_a_message_of_unexpected_size_is_refused(connected_ranks: list[RankLinks]) -> None:
    connected_ranks[0].outgoing[1].send(5, bytes(8))
    with pytest.raises(LinkError, match=r"rank 0 sent 8 bytes instead of 12 \(tag 5\); check that all ranks"):
        connected_ranks[1].incoming[0].receive(5, bytearray(12))


def test_a_message_that_is_not_read_completely_ends_the_link(connected_ranks: list[RankLinks]) -> None:
    connected_ranks[0].outgoing[1].send(5, bytes(LARGE_BYTES))
    pieces = connected_ranks[1].incoming[0].receive_pieces(5, LARGE_BYTES)
    next(pieces)
    del pieces
    with pytest.raises(LinkError, match="a message to or from rank 0 was interrupted"):
        connected_ranks[1].incoming[0].receive(6, bytearray(4))
