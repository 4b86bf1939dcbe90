"""Naming the ranks that are silent, through a store whose own process may be one of them."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from common.ranks import silent_ranks
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.ranks.silent_ranks import SilentRankWatchdog, describe_silent_ranks
from tests.harness.processes import wait_until

SECONDS = datetime.timedelta(seconds=30)
DEAF = "rank 0 on a, which serves the rendezvous store, does not answer"


def serve(answer: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 2, True, SECONDS, wait_for_workers=False)
    answer.send(store.port)
    signal.pause()


@pytest.fixture
def found() -> Iterator[tuple[World, int]]:
    """Rank 1's world, and the pid of the process that has its store, as rank 0 does."""
    context = multiprocessing.get_context("forkserver")  # a fork of this process would inherit the locks of its threads
    context.set_forkserver_preload(["torch.distributed"])
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(SECONDS.total_seconds()), "the store's process has begun"
    store = dist.TCPStore("127.0.0.1", ours.recv(), 2, False, SECONDS, wait_for_workers=False)
    yield (
        World(
            rank=1, size=2, local_rank=0, local_size=1, nodes=2, launcher="slurm", hosts=("a", "b"),
            device=torch.device("cpu"), backend="gloo", threads=1, timeout=SECONDS, store=store,
        ),
        process.pid or 0,
    )  # fmt: skip
    process.kill()
    process.join()


def test_who_has_not_waited_is_named(found: tuple[World, int]) -> None:
    world, _ = found
    assert describe_silent_ranks(world, 0.1).startswith("rank 0 on a did not answer within 30 s")
    assert world.store
    world.store.set("waited/0", "")
    assert describe_silent_ranks(world, 0.1) == ""


def test_a_store_that_stands_still_is_not_waited_for(found: tuple[World, int], monkeypatch: pytest.MonkeyPatch) -> None:
    world, server = found
    monkeypatch.setattr(silent_ranks, "ANSWER_SECONDS", 0.5)
    os.kill(server, signal.SIGSTOP)
    began = time.monotonic()
    assert describe_silent_ranks(world, 0.1) == DEAF
    assert time.monotonic() - began < 5


def test_a_store_that_is_gone_is_told(found: tuple[World, int]) -> None:
    world, server = found
    os.kill(server, signal.SIGKILL)
    assert describe_silent_ranks(world, 0.1) == DEAF


def test_a_message_that_nothing_ends_is_watched(found: tuple[World, int]) -> None:
    """As long as steps come nothing is said; then who is missing is named, once."""
    world, _ = found
    said = list[str]()
    watch = SilentRankWatchdog(Ranks(world), 0.5, 0.1, said.append)
    for _ in range(20):
        time.sleep(0.05)
        watch.restart_time_limit()
    assert not said
    wait_until(lambda: said, "the missing rank is named", 20)
    assert said == [describe_silent_ranks(world, 0.1)] and said[0].startswith("rank 0 on a did not answer")


def test_a_wait_of_all_is_no_end_of_the_watch(found: tuple[World, int]) -> None:
    world, _ = found
    assert world.store
    said = list[str]()
    world.store.set("waited/1/0", "")  # rank 0 waits, too
    watch = SilentRankWatchdog(Ranks(world), 0.2, 0.1, said.append)
    time.sleep(1)
    assert not said
    watch.restart_time_limit()
    wait_until(lambda: said, "the missing rank is named", 20)


def test_a_watch_that_is_closed_says_nothing(found: tuple[World, int]) -> None:
    world, _ = found
    said = list[str]()
    watch = SilentRankWatchdog(Ranks(world), 0.1, 0.3, said.append)
    time.sleep(0.2)  # it asks by now
    watch.close()
    time.sleep(0.5)
    assert not said
