"""Messages between ranks of one host, through shared memory."""

from __future__ import annotations

import os

import pytest

from common.ranks.links.connecting import RankLinks
from common.ranks.links.memory_stream import (
    POLLING_SECONDS,
    MemoryStream,
    allocate_memory,
    choose_polling_seconds,
)
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
