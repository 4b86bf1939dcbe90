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

from common import preemption
from common.launch import World
from common.preemption import name_the_silent

SECONDS = datetime.timedelta(seconds=30)
DEAF = "rank 0 on a, through which the others meet, does not answer"


def serve(answer: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 2, True, SECONDS, wait_for_workers=False)
    answer.send(store.port)
    signal.pause()


@pytest.fixture
def found() -> Iterator[tuple[World, int]]:
    """Rank 1's world, and the pid of the process that has its store, as rank 0 does."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    store = dist.TCPStore("127.0.0.1", ours.recv(), 2, False, SECONDS, wait_for_workers=False)
    yield (
        World(
            rank=1, size=2, local_rank=0, local_size=1, node=1, nodes=2, how="slurm", hosts=("a", "b"),
            device=torch.device("cpu"), backend="gloo", threads=1, timeout=SECONDS, store=store,
        ),
        process.pid or 0,
    )  # fmt: skip
    process.kill()
    process.join()


def test_who_has_not_waited_is_named(found: tuple[World, int]) -> None:
    world, _ = found
    assert name_the_silent(world, 0.1).startswith("rank 0 on a did not answer within 30 s")
    assert world.store
    world.store.set("waited/0", "")
    assert name_the_silent(world, 0.1) == ""


def test_a_store_that_stands_still_is_not_waited_for(found: tuple[World, int], monkeypatch: pytest.MonkeyPatch) -> None:
    world, server = found
    monkeypatch.setattr(preemption, "ANSWER", 0.5)
    os.kill(server, signal.SIGSTOP)
    began = time.monotonic()
    assert name_the_silent(world, 0.1) == DEAF
    assert time.monotonic() - began < 5


def test_a_store_that_is_gone_is_told(found: tuple[World, int]) -> None:
    world, server = found
    os.kill(server, signal.SIGKILL)
    assert name_the_silent(world, 0.1) == DEAF
