"""Connections that do not come from a rank of the run are rejected and named, and the rank continues to wait."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from common.ranks.links import reception
from common.ranks.links.connecting import RankAddress, RankLinks
from common.ranks.links.reception import MAX_PENDING
from common.ranks.links.welcome import ANSWER_BYTES, ConnectionId, make_hello
from common.system.errors import UnreachableError
from tests.harness.commands.processes import WAIT_TIMEOUT
from tests.harness.environment.randomness import draw_seed
from tests.harness.ranks.folder_rendezvous import FolderRendezvous, fork
from tests.harness.ranks.foreign_clients import send_random_inputs

RANK_1_TO_RANK_0 = ConnectionId("run", 1, 0)
WRONG_TOKEN = b"a guess, not the token"
TLS_CLIENT_HELLO_START = b"\x16\x03\x01\2\0\1"
NOBODY = 65534  # id of a user without rights


class WaitingRank:
    """Rank 0, which waits for rank 1."""

    def __init__(self, rendezvous: FolderRendezvous) -> None:
        self.rendezvous = rendezvous
        self.connections: list[socket.socket] = []
        self.pool = ThreadPoolExecutor(1)
        self.links: Future[RankLinks] = self.pool.submit(rendezvous.join, 0, 2)
        self.address = RankAddress(*json.loads(rendezvous.get("link/0")))

    @property
    def is_local(self) -> bool:
        """Whether the rank accepts only processes on this host."""
        return bool(self.address.unix_socket_name)

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX if self.is_local else socket.AF_INET)
        connection.settimeout(WAIT_TIMEOUT)
        if self.is_local:
            connection.connect("\0" + self.address.unix_socket_name)
        else:
            connection.connect((self.address.address, self.address.port))
        return connection

    def send(self, message: bytes) -> bytes:
        """Send a message on a new connection, and return the answer before the connection is closed."""
        with self.connect() as connection:
            try:
                connection.sendall(message)
                return connection.recv(100)
            except ConnectionError:
                return b""

    def finish(self) -> None:
        """Check that rank 1 can still connect and receive a message."""
        links_of_rank_1 = self.rendezvous.join(1, 2)
        links_of_rank_0 = self.links.result(WAIT_TIMEOUT)
        links_of_rank_0.outgoing[1].send(0, b"four")
        received = bytearray(4)
        links_of_rank_1.incoming[0].receive(0, received)
        assert received == b"four"

        for connection in self.connections:
            connection.close()
        self.pool.shutdown()


@pytest.fixture
def waiting_rank(rendezvous: FolderRendezvous) -> Iterator[WaitingRank]:
    rank = WaitingRank(rendezvous)
    yield rank
    rank.finish()


@pytest.mark.parametrize("rendezvous", ["tcp", "memory"], indirect=True)
@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "sent an invalid handshake"),
        (make_hello(RANK_1_TO_RANK_0, WRONG_TOKEN), "does not know the token that this rank published"),
        (make_hello(ConnectionId("last week's", 1, 0), WRONG_TOKEN), 'belongs to "last week\'s", not to run'),
        (make_hello(ConnectionId("run", 0, 1), WRONG_TOKEN), "expected rank 1, but this is rank 0"),
    ],
    ids=["http", "token", "run", "rank"],
)
def test_a_foreign_connection_is_rejected_and_named_once(
    waiting_rank: WaitingRank, message: bytes, reason: str
) -> None:
    assert waiting_rank.send(message) == b""
    (warning,) = waiting_rank.rendezvous.warnings
    peer = "this host" if waiting_rank.is_local else "127.0.0.1:"
    assert warning.startswith(f"rank 0 rejected a connection from {peer}")
    assert f": the peer {reason};" in warning

    waiting_rank.send(message)
    assert waiting_rank.rendezvous.warnings == [warning], "an address is mentioned once"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("rendezvous", ["memory"], indirect=True)
def test_another_user_of_this_host_is_rejected_even_with_the_token(waiting_rank: WaitingRank) -> None:
    def connect_as_another_user() -> None:
        os.setuid(NOBODY)
        hello = make_hello(RANK_1_TO_RANK_0, bytes.fromhex(waiting_rank.address.token))
        assert waiting_rank.send(hello) == b""

    process = fork(connect_as_another_user)
    process.join(WAIT_TIMEOUT)
    assert process.exitcode == 0
    assert "this host: the peer belongs to another user" in waiting_rank.rendezvous.warnings[0]


@pytest.fixture
def short_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "HANDSHAKE_SECONDS", 0.2)


@pytest.mark.usefixtures("short_handshakes")
def test_incomplete_handshakes_are_closed_after_their_time_limit(waiting_rank: WaitingRank) -> None:
    is_encrypted = "identity" in waiting_rank.rendezvous.options
    hello = make_hello(RANK_1_TO_RANK_0, WRONG_TOKEN)
    with waiting_rank.connect() as silent, waiting_rank.connect() as incomplete:
        incomplete.sendall(TLS_CLIENT_HELLO_START if is_encrypted else hello[:20])
        assert silent.recv(1) == b""
        with contextlib.suppress(ConnectionResetError):  # the rank has not read all of the bytes
            assert incomplete.recv(1) == b""
    warnings = "\n".join(waiting_rank.rendezvous.warnings)
    assert "did not prove within 0.2 s that it is a rank of this run" in warnings


@pytest.mark.parametrize("rendezvous", ["tcp"], indirect=True)
def test_a_second_connection_of_a_connected_rank_is_rejected(rendezvous: FolderRendezvous) -> None:
    with ThreadPoolExecutor(1) as pool:
        links = pool.submit(rendezvous.join, 0, 3, setup_timeout=0.5)
        address = RankAddress(*json.loads(rendezvous.get("link/0")))
        hello = make_hello(RANK_1_TO_RANK_0, bytes.fromhex(address.token))
        with socket.create_connection((address.address, address.port)) as first:
            first.sendall(hello)
            assert len(first.recv(100)) == ANSWER_BYTES
            with socket.create_connection((address.address, address.port)) as second:
                second.sendall(hello)
                assert second.recv(100) == b""
        with pytest.raises(UnreachableError, match="rank 1 has not published its address"):
            links.result(WAIT_TIMEOUT)
    assert "claims to be rank 1, which is already connected" in rendezvous.warnings[0]


@pytest.fixture
def long_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "HANDSHAKE_SECONDS", 10 * WAIT_TIMEOUT)


@pytest.mark.usefixtures("long_handshakes")
def test_more_pending_connections_than_allowed_do_not_keep_rank_1_out(waiting_rank: WaitingRank) -> None:
    for _ in range(3 * MAX_PENDING):
        waiting_rank.connections.append(waiting_rank.connect())


def test_random_input_does_not_end_the_rank(waiting_rank: WaitingRank) -> None:
    send_random_inputs(waiting_rank.address, 150, draw_seed("strangers"), is_local=waiting_rank.is_local)
