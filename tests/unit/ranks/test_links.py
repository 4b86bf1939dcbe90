"""Messages between two ranks: over TCP, over TLS, and through the memory of their host."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.ranks.links.connecting import RankLinks
from common.ranks.links.memory_stream import SLOT_COUNT, MemoryStream, allocate_memory
from common.ranks.links.outgoing import LinkError, LinkTimeout
from common.ranks.links.socket_stream import PIECE_BYTES, SMALL_BYTES
from tests.harness.file_limit import limit_file_size
from tests.harness.processes import PATIENCE
from tests.harness.transport import Meeting, fork, identity, meeting, pair

__all__ = ["identity", "meeting", "pair"]
LARGE = 3 * SLOT_COUNT * PIECE_BYTES + 5  # more than kernel or shared memory hold
SIZES = (0, 1, 4, SMALL_BYTES, SMALL_BYTES + 1, PIECE_BYTES, LARGE)


def test_every_size_arrives_and_is_counted(pair: list[RankLinks]) -> None:
    sender, reader = pair[0].outgoing[1], pair[1].incoming[0]
    for count, size in enumerate(SIZES):
        data, got = os.urandom(size), bytearray(size)
        ticket = sender.send(count, data)
        reader.receive(count, got)
        sender.wait_until_written(ticket)
        assert got == data, size
        sender.send(count, data)
        assert b"".join(bytes(piece) for piece in reader.receive_pieces(count, size)) == data, size
    assert sender.bytes_sent == 2 * sum(SIZES)


def test_all_may_send_before_anybody_receives(pair: list[RankLinks]) -> None:
    def play(rank: int) -> bool:
        peer = 1 - rank
        large = os.urandom(LARGE)
        tickets = [pair[rank].outgoing[peer].send(0, large)]
        small = bytearray(SMALL_BYTES)
        for number in range(300):
            small[:2] = number.to_bytes(2)
            tickets.append(pair[rank].outgoing[peer].send(1, small))  # the sender may write to it at once
        got = bytearray(LARGE)
        pair[rank].incoming[peer].receive(0, got)
        for number in range(300):
            pair[rank].incoming[peer].receive(1, small)
            assert small[:2] == number.to_bytes(2)
        for ticket in tickets:
            pair[rank].outgoing[peer].wait_until_written(ticket)
        return True

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(play, (0, 1))) == [True, True]


def test_a_small_message_that_has_to_wait_is_sent_as_it_was(pair: list[RankLinks]) -> None:
    """One that goes through memory waits where all slots are taken; over a socket, where the kernel's memory is."""
    sender, reader = pair[0].outgoing[1], pair[1].incoming[0]
    message = bytearray(SMALL_BYTES)
    tickets = []
    for number in range(200):
        message[:] = bytes([number]) * SMALL_BYTES
        tickets.append(sender.send(number, message))
    with pytest.raises(LinkTimeout):  # the last ones wait
        sender.wait_until_written(tickets[-1], 0.01)
    for number in range(200):
        got = bytearray(SMALL_BYTES)
        reader.receive(number, got)
        assert got == bytes([number]) * SMALL_BYTES, number
    sender.wait_until_written(tickets[-1])


def test_messages_wait_for_those_who_want_them(pair: list[RankLinks]) -> None:
    sender, reader = pair[0].outgoing[1], pair[1].incoming[0]
    for tag in (1, 2, 3, 2):
        sender.send(tag, bytes([tag]) * SMALL_BYTES * tag)
    for tag in (2, 3, 2, 1):
        assert all(bytes(piece) == bytes([tag]) * len(piece) for piece in reader.receive_pieces(tag, SMALL_BYTES * tag))
    got = [bytearray(LARGE) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(reader.receive, tag, got[tag]) for tag in range(4)]
        for tag in (3, 1, 0, 2):
            sender.send(tag, bytes([tag]) * LARGE)
        for future in waiting:
            future.result(PATIENCE)
    assert [set(data) for data in got] == [{0}, {1}, {2}, {3}]


def test_closing_ends_at_once_what_waits(pair: list[RankLinks]) -> None:
    """The time limit of these links is longer than that of the test."""
    ticket = pair[0].outgoing[1].send(0, bytes(20 * LARGE))
    waits = [
        lambda: pair[0].outgoing[1].wait_until_written(ticket),
        lambda: pair[0].incoming[1].receive(7, bytearray(4)),
        lambda: pair[0].incoming[1].receive(8, bytearray(4)),
    ]
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(wait) for wait in waits]
        time.sleep(0.05)
        assert not any(future.done() for future in waiting)
        pair[0].close()
        for future in waiting:
            with pytest.raises(LinkError, match="the connection with rank 1 was closed by this rank"):
                future.result(PATIENCE)
    for again in (*waits, lambda: pair[0].outgoing[1].send(0, b"")):
        with pytest.raises(LinkError, match="was closed by this rank"):
            again()


def test_a_rank_that_dies_is_named_at_once(meeting: Meeting) -> None:
    def sleep() -> None:
        held = meeting.join(1, 2)
        child = os.fork()  # such as a loader's worker, which may live on for a while
        if child:
            meeting.set("child", str(child))
        time.sleep(PATIENCE)
        held.close()

    process = fork(sleep)
    links = meeting.join(0, 2)
    child = int(meeting.get("child"))
    ticket = links.outgoing[1].send(0, bytes(20 * LARGE))
    waits = (lambda: links.outgoing[1].wait_until_written(ticket), lambda: links.incoming[1].receive(7, bytearray(4)))
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(wait) for wait in waits]
        time.sleep(0.05)
        assert process.pid and not any(future.done() for future in waiting)
        os.kill(process.pid, signal.SIGKILL)
        for future in waiting:
            with pytest.raises(LinkError, match="rank 1 has closed its connection; see its log"):
                future.result(PATIENCE)
    os.kill(child, signal.SIGKILL)
    process.join()
    links.close()


def test_the_last_message_outlives_its_rank(meeting: Meeting) -> None:
    def send() -> None:
        links = meeting.join(1, 2)
        links.outgoing[0].wait_until_written(links.outgoing[0].send(0, b"x" * SMALL_BYTES * 3))
        links.close()

    process = fork(send)
    links = meeting.join(0, 2)
    process.join(PATIENCE)
    got = bytearray(SMALL_BYTES * 3)
    links.incoming[1].receive(0, got)
    assert set(got) == {ord("x")}
    links.close()


def test_a_silent_rank_is_named_after_the_time_limit(meeting: Meeting) -> None:
    ranks = meeting.join_all(2, timeout=0.2)
    ticket = ranks[0].outgoing[1].send(0, bytes(20 * LARGE))
    told = r"rank 1 does not answer \(no progress for 0.2 s\); see its log, or raise launch.step_timeout"
    for wait in (
        lambda: ranks[0].incoming[1].receive(0, bytearray(4)),
        lambda: ranks[0].outgoing[1].wait_until_written(ticket),
    ):
        with pytest.raises(LinkTimeout, match=told):
            wait()
    for links in ranks:
        links.close()


def test_a_patient_rank_waits_longer(meeting: Meeting) -> None:
    ranks = meeting.join_all(2, timeout=0.1)
    got = [bytearray(4), bytearray(4)]
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(ranks[0].incoming[1].receive, tag, got[tag], patient=True) for tag in (0, 1)]
        time.sleep(0.3)
        for tag in (1, 0):
            ranks[1].outgoing[0].send(tag, bytes([tag]) * 4)
        for future in waiting:
            future.result(PATIENCE)
    assert got == [bytes(4), b"\1\1\1\1"]
    for links in ranks:
        links.close()


def test_another_size_than_expected_is_told(pair: list[RankLinks]) -> None:
    pair[0].outgoing[1].send(5, bytes(8))
    with pytest.raises(LinkError, match=r"rank 0 sent 8 bytes instead of 12 \(tag 5\); check that all ranks"):
        pair[1].incoming[0].receive(5, bytearray(12))


def test_a_message_that_is_left_half_read_ends_the_link(pair: list[RankLinks]) -> None:
    pair[0].outgoing[1].send(5, bytes(LARGE))
    pieces = pair[1].incoming[0].receive_pieces(5, LARGE)
    next(pieces)
    del pieces
    with pytest.raises(LinkError, match="a message to or from rank 0 was interrupted"):
        pair[1].incoming[0].receive(6, bytearray(4))


def test_links_of_closed_ranks_leave_no_thread(meeting: Meeting) -> None:
    before = set(threading.enumerate())
    ranks = meeting.join_all(2)
    for rank in (0, 1):
        ranks[rank].outgoing[1 - rank].send(0, bytes(LARGE))
    for links in ranks:
        links.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_memory_has_its_pages_before_it_is_used() -> None:
    with open(allocate_memory(1 << 20), "rb") as file:
        assert os.fstat(file.fileno()).st_blocks * 512 >= 1 << 20


@pytest.mark.parametrize("meeting", ["memory"], indirect=True)
def test_without_memory_messages_go_through_the_socket(pair: list[RankLinks]) -> None:
    sender, reader = pair[0].outgoing[1], pair[1].incoming[0]
    stream = sender.stream
    assert isinstance(stream, MemoryStream)
    data, got = os.urandom(LARGE), bytearray(LARGE)
    with limit_file_size(100_000):
        for _ in range(2):
            ticket = sender.send(0, data)
            reader.receive(0, got)
            sender.wait_until_written(ticket)
            assert got == data and not stream.shared
