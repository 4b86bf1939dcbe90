"""Messages between ranks of one host, through shared memory."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from common.ranks.links.connecting import RankLinks
from common.ranks.links.incoming import IncomingLink
from common.ranks.links.memory_stream import (
    MEMORY_BIT,
    POLLING_SECONDS,
    MemoryStream,
    allocate_memory,
    choose_polling_seconds,
)
from common.ranks.links.outgoing import LinkError, OutgoingLink
from common.ranks.links.socket_stream import HEADER
from tests.harness.environment.size_limit import limit_file_size
from tests.harness.ranks.folder_rendezvous import LARGE_BYTES


def test_ranks_do_not_poll_if_there_are_more_ranks_than_allowed_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)
    assert choose_polling_seconds(2) == POLLING_SECONDS
    assert choose_polling_seconds(3) == 0

    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "4")  # SLURM binds each rank to its cores
    assert choose_polling_seconds(4) == POLLING_SECONDS
    assert choose_polling_seconds(5) == 0


def test_memory_is_allocated_before_it_is_used() -> None:
    with open(allocate_memory(1 << 20), "rb") as file:
        assert os.fstat(file.fileno()).st_blocks * 512 >= 1 << 20


@pytest.mark.parametrize("rendezvous", ["memory"], indirect=True)
def test_without_shared_memory_messages_go_through_the_socket(connected_ranks: list[RankLinks]) -> None:
    sender = connected_ranks[0].outgoing[1]
    receiver = connected_ranks[1].incoming[0]
    stream = sender.stream
    assert isinstance(stream, MemoryStream)
    message = os.urandom(LARGE_BYTES)
    received = bytearray(LARGE_BYTES)
    with limit_file_size(100_000):
        for _ in range(2):
            ticket = sender.send(0, message)
            receiver.receive(0, received)
            sender.wait_until_written(ticket)
            assert received == message
            assert not stream.shared


@contextlib.contextmanager
def connect_streams() -> Iterator[tuple[MemoryStream, MemoryStream]]:
    """Yield the two ends of a connection."""
    writer, reader = [MemoryStream(end, timeout=60, polling_seconds=0) for end in socket.socketpair()]
    try:
        yield writer, reader
    finally:
        writer.close()
        reader.close()


def test_a_peer_that_exits_before_it_passes_memory_has_closed_its_connection() -> None:
    with connect_streams() as (writer, reader):
        writer.socket.sendall(HEADER.pack(0, 4096 | MEMORY_BIT))
        writer.close()
        with pytest.raises(LinkError, match="rank 1 has closed its connection"):
            IncomingLink(reader, 1).receive(0, bytearray(4))


def test_a_reader_that_can_open_no_more_files_reports_this() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with connect_streams() as (writer, reader):
        writer.share_memory(0, 4096)
        unused_descriptor = os.dup(0)
        os.close(unused_descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (unused_descriptor, hard))
        try:
            with pytest.raises(LinkError, match="the connection with rank 1 failed: Too many open files"):
                IncomingLink(reader, 1).receive(0, bytearray(4))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_sending_does_not_block_if_the_socket_has_no_space_for_the_memory() -> None:
    with connect_streams() as (writer, reader), ThreadPoolExecutor(1) as pool:
        junk = memoryview(bytes(HEADER.size))
        count = 0
        while writer.write_without_blocking(junk):
            count += 1
        reader.socket.recv(HEADER.size)  # makes space for the header that precedes the memory
        message = os.urandom(LARGE_BYTES)
        sender = OutgoingLink(writer, 1)
        sending = pool.submit(sender.send, 0, message)
        try:
            ticket = sending.result(5)
        finally:
            for _ in range(count - 1):
                reader.socket.recv(HEADER.size)
        received = bytearray(LARGE_BYTES)
        IncomingLink(reader, 0).receive(0, received)
        sender.wait_until_written(ticket)
        assert received == message
