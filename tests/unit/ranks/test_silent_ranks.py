"""Silent ranks are named with the help of a store, whose own process may be silent."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from common.ranks import silent_ranks
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.ranks.silent_ranks import SilentRankWatchdog, describe_silent_ranks
from tests.harness.commands.processes import wait_until

TIMEOUT = datetime.timedelta(seconds=30)
NO_STORE_MESSAGE = "rank 0 on a, which serves the rendezvous store, does not answer"


@dataclass
class Rendezvous:
    """The world of rank 1, and the process that serves its store, as rank 0 does."""

    world: World
    store: dist.Store
    server_pid: int


def serve_store(connection: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 2, True, TIMEOUT, wait_for_workers=False)
    connection.send(store.port)
    signal.pause()


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    context = multiprocessing.get_context("forkserver")  # a fork of this process would inherit the locks of its threads
    context.set_forkserver_preload(["torch.distributed"])
    connection, connection_of_server = context.Pipe()
    server = context.Process(target=serve_store, args=(connection_of_server,), daemon=True)
    server.start()
    assert connection.poll(TIMEOUT.total_seconds()), "the server did not start"
    store = dist.TCPStore("127.0.0.1", connection.recv(), 2, False, TIMEOUT, wait_for_workers=False)
    world = World(
        rank=1, size=2, local_rank=0, local_size=1, nodes=2, launcher="slurm", hosts=("a", "b"),
        device=torch.device("cpu"), backend="gloo", threads=1, timeout=TIMEOUT, store=store,
    )  # fmt: skip
    yield Rendezvous(world, store, server.pid or 0)
    server.kill()
    server.join()


def test_a_rank_that_does_not_wait_is_named(rendezvous: Rendezvous) -> None:
    description = describe_silent_ranks(rendezvous.world, 0.1)
    assert description.startswith("rank 0 on a did not answer within 30 s")
    rendezvous.store.set("waited/0", "")
    assert describe_silent_ranks(rendezvous.world, 0.1) == ""


def test_a_store_that_does_not_answer_is_reported_soon(rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silent_ranks, "ANSWER_SECONDS", 0.5)
    os.kill(rendezvous.server_pid, signal.SIGSTOP)
    start = time.monotonic()
    assert describe_silent_ranks(rendezvous.world, 0.1) == NO_STORE_MESSAGE
    assert time.monotonic() - start < 5


def test_a_store_whose_process_was_killed_is_reported(rendezvous: Rendezvous) -> None:
    os.kill(rendezvous.server_pid, signal.SIGKILL)
    assert describe_silent_ranks(rendezvous.world, 0.1) == NO_STORE_MESSAGE


def test_the_watchdog_reports_a_silent_rank_once_after_the_last_step(rendezvous: Rendezvous) -> None:
    reports: list[str] = []
    watchdog = SilentRankWatchdog(Ranks(rendezvous.world), 0.5, 0.1, reports.append)
    for _ in range(20):
        time.sleep(0.05)
        watchdog.restart_time_limit()
    assert not reports

    wait_until(lambda: reports, "the silent rank is reported", 20)
    assert reports == [describe_silent_ranks(rendezvous.world, 0.1)]
    assert reports[0].startswith("rank 0 on a did not answer")


def test_the_watchdog_continues_after_a_wait_of_all_ranks(rendezvous: Rendezvous) -> None:
    reports: list[str] = []
    rendezvous.store.set("waited/1/0", "")  # rank 0 waits, too
    watchdog = SilentRankWatchdog(Ranks(rendezvous.world), 0.2, 0.1, reports.append)
    time.sleep(1)
    assert not reports
    watchdog.restart_time_limit()
    wait_until(lambda: reports, "the silent rank is reported", 20)


def test_a_closed_watchdog_reports_nothing(rendezvous: Rendezvous) -> None:
    reports: list[str] = []
    watchdog = SilentRankWatchdog(Ranks(rendezvous.world), 0.1, 0.3, reports.append)
    time.sleep(0.2)  # the watchdog is asking the ranks now
    watchdog.close()
    time.sleep(0.5)
    assert not reports
