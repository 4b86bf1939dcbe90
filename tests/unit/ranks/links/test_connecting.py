"""Connecting ranks and closing their links: over TCP, over TLS, and through shared memory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from common.ranks.links.connecting import RankAddress, RankLinks
from common.ranks.links.outgoing import LinkError
from common.ranks.links.welcome import ANSWER_BYTES
from common.system import network
from common.system.errors import UnreachableError
from tests.harness.commands.processes import WAIT_TIMEOUT
from tests.harness.ranks.folder_rendezvous import LARGE_BYTES, FolderRendezvous, fork


@contextlib.contextmanager
def wait_in_threads(calls: Sequence[Callable[[], object]]) -> Iterator[list[Future[object]]]:
    """Run each call in a thread, and check that all of them wait."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        time.sleep(0.05)
        assert not any(future.done() for future in futures)
        yield futures


def test_closing_the_links_ends_all_waits_at_once(connected_ranks: list[RankLinks]) -> None:
    """The time limit of the links is longer than that of the test."""
    sender = connected_ranks[0].outgoing[1]
    receiver = connected_ranks[0].incoming[1]
    ticket = sender.send(0, bytes(20 * LARGE_BYTES))
    calls: list[Callable[[], object]] = [
        lambda: sender.wait_until_written(ticket),
        lambda: receiver.receive(7, bytearray(4)),
        lambda: receiver.receive(8, bytearray(4)),
    ]
    message = "the connection with rank 1 was closed by this rank"
    with wait_in_threads(calls) as futures:
        connected_ranks[0].close()
        for future in futures:
            with pytest.raises(LinkError, match=message):
                future.result(WAIT_TIMEOUT)

    calls.append(lambda: sender.send(0, b""))
    for call in calls:
        with pytest.raises(LinkError, match="was closed by this rank"):
            call()


def test_a_rank_that_is_killed_is_named_at_once(rendezvous: FolderRendezvous) -> None:
    def join_and_sleep() -> None:
        links = rendezvous.join(1, 2)
        child = os.fork()  # such as a data worker, which may outlive its rank
        if child:
            rendezvous.set("child", str(child))
        time.sleep(WAIT_TIMEOUT)
        links.close()

    process = fork(join_and_sleep)
    links = rendezvous.join(0, 2)
    child = int(rendezvous.get("child"))
    ticket = links.outgoing[1].send(0, bytes(20 * LARGE_BYTES))
    calls: list[Callable[[], object]] = [
        lambda: links.outgoing[1].wait_until_written(ticket),
        lambda: links.incoming[1].receive(7, bytearray(4)),
    ]
    try:
        with wait_in_threads(calls) as futures:
            process.kill()
            for future in futures:
                with pytest.raises(LinkError, match="rank 1 has closed its connection; see its log"):
                    future.result(WAIT_TIMEOUT)
    finally:
        os.kill(child, signal.SIGKILL)
        process.kill()
        process.join()


def test_closed_links_leave_no_threads(rendezvous: FolderRendezvous) -> None:
    threads_before = set(threading.enumerate())
    ranks = rendezvous.join_all(2)
    for rank in (0, 1):
        ranks[rank].outgoing[1 - rank].send(0, bytes(LARGE_BYTES))
    for links in ranks:
        links.close()
    for thread in set(threading.enumerate()) - threads_before:
        thread.join(WAIT_TIMEOUT)
        assert not thread.is_alive()


@pytest.mark.parametrize("rendezvous", ["tcp"], indirect=True)
def test_a_program_that_does_not_know_the_token_is_not_accepted_as_a_rank(rendezvous: FolderRendezvous) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        port = listener.getsockname()[1]
        address = RankAddress("127.0.0.1", port, "00", "", "")
        rendezvous.set("link/1", json.dumps(address))
        future = pool.submit(rendezvous.join, 0, 2, setup_timeout=0.2)
        listener.settimeout(0.05)
        while not future.done():
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                connection.sendall(bytes(ANSWER_BYTES))
                connection.recv(1000)
                connection.close()
        with pytest.raises(UnreachableError, match=f"rank 1 at 127.0.0.1:{port}: the peer gave a wrong answer"):
            future.result()


def test_a_rank_without_an_address_is_named(rendezvous: FolderRendezvous) -> None:
    with pytest.raises(UnreachableError, match="rank 1 has not published its address"):
        rendezvous.join(0, 2, setup_timeout=0.1)


@pytest.mark.parametrize(
    ("setup_timeout", "unreachable_seconds", "remedy"),
    [(0.1, 10.0, "raise launch.setup_timeout"), (60.0, 0.1, "set launch.interface")],
)
def test_a_rank_that_does_not_listen_is_named(
    setup_timeout: float,
    unreachable_seconds: float,
    remedy: str,
    rendezvous: FolderRendezvous,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A longer time limit is suggested only if this limit has ended the attempts."""
    monkeypatch.setattr(network, "UNREACHABLE_SECONDS", unreachable_seconds)
    address = RankAddress("127.0.0.1", 1, "00", "", "")
    rendezvous.set("link/1", json.dumps(address))
    problem = "rank 0 cannot connect to rank 1 at 127.0.0.1:1: Connection refused"
    message = f"{problem}; see the log of rank 1, check the firewall, or {remedy}$"
    with pytest.raises(UnreachableError, match=message):
        rendezvous.join(0, 2, setup_timeout=setup_timeout)
