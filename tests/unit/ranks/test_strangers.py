"""Who is not a rank of the run is refused and named, whatever it sends, and the run goes on waiting for who is."""

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
from tests.harness.chance import draw_seed
from tests.harness.processes import PATIENCE
from tests.harness.strangers import attack
from tests.harness.transport import Meeting, fork, identity, meeting

__all__ = ["identity", "meeting"]


class Waiting:
    """Rank 0, which waits for rank 1."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.held: list[socket.socket] = []
        self.pool = ThreadPoolExecutor(1)
        self.future: Future[RankLinks] = self.pool.submit(meeting.join, 0, 2)
        self.found = RankAddress(*json.loads(meeting.get("link/0")))

    def connect(self) -> socket.socket:
        local = bool(self.found.unix_socket_name)
        stranger = socket.socket(socket.AF_UNIX if local else socket.AF_INET)
        stranger.settimeout(PATIENCE)
        stranger.connect("\0" + self.found.unix_socket_name if local else (self.found.address, self.found.port))
        return stranger

    def send(self, data: bytes) -> bytes:
        """Send something; returns what is answered until the connection is closed."""
        with self.connect() as stranger:
            try:
                stranger.sendall(data)
                return stranger.recv(100)
            except ConnectionError:
                return b""

    def finish(self) -> None:
        """Rank 1 comes after all, and a message passes."""
        one = self.meeting.join(1, 2)
        zero = self.future.result(PATIENCE)
        zero.outgoing[1].send(0, b"four")
        got = bytearray(4)
        one.incoming[0].receive(0, got)
        assert got == b"four"
        zero.close()
        one.close()
        for stranger in self.held:
            stranger.close()


@pytest.fixture
def waiting(meeting: Meeting) -> Iterator[Waiting]:
    rank = Waiting(meeting)
    yield rank
    rank.finish()
    rank.pool.shutdown()


TOKEN = b"a guess, not the token"


@pytest.mark.parametrize("meeting", ["tcp", "memory"], indirect=True)
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "sent an invalid handshake"),
        (make_hello(ConnectionId("run", 1, 0), TOKEN), "does not know the token that this rank published"),
        (make_hello(ConnectionId("last week's", 1, 0), TOKEN), 'belongs to "last week\'s", not to run'),
        (make_hello(ConnectionId("run", 0, 1), TOKEN), "expected rank 1, but this is rank 0"),
    ],
    ids=["http", "token", "run", "rank"],
)
def test_a_stranger_is_refused_and_named(waiting: Waiting, data: bytes, reason: str) -> None:
    assert waiting.send(data) == b""
    (line,) = waiting.meeting.lines
    who = "this host" if waiting.found.unix_socket_name else r"127.0.0.1:"
    assert line.startswith(f"rank 0 rejected a connection from {who}") and f": the peer {reason};" in line
    waiting.send(data)
    assert waiting.meeting.lines == [line], "an address is mentioned once"


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "HANDSHAKE_SECONDS", 0.2)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("meeting", ["memory"], indirect=True)
def test_another_user_of_this_host_is_refused_whatever_he_knows(waiting: Waiting) -> None:
    def intrude() -> None:
        os.setuid(65534)
        hello = make_hello(ConnectionId("run", 1, 0), bytes.fromhex(waiting.found.token))
        assert waiting.send(hello) == b""

    process = fork(intrude)
    process.join(PATIENCE)
    assert process.exitcode == 0
    assert "this host: the peer belongs to another user" in waiting.meeting.lines[0]


@pytest.mark.parametrize("meeting", ["tcp"], indirect=True)
def test_a_program_that_cannot_prove_the_token_is_not_taken_for_a_rank(meeting: Meeting) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        port = listener.getsockname()[1]
        meeting.set("link/1", json.dumps(RankAddress("127.0.0.1", port, "00", "", "")))
        waiting = pool.submit(meeting.join, 0, 2, setup_timeout=0.2)
        listener.settimeout(0.05)
        while not waiting.done():
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                connection.sendall(bytes(ANSWER_BYTES))
                connection.recv(1000)
                connection.close()
        with pytest.raises(UnreachableError, match=f"rank 1 at 127.0.0.1:{port}: the peer gave a wrong answer"):
            waiting.result()


def test_silence_and_half_a_welcome_end_after_their_time(brief: None, waiting: Waiting) -> None:
    with waiting.connect() as silent, waiting.connect() as half:
        is_encrypted = "identity" in waiting.meeting.options
        half.sendall(b"\x16\x03\x01\2\0\1" if is_encrypted else make_hello(ConnectionId("run", 1, 0), TOKEN)[:20])
        assert silent.recv(1) == b""
        with contextlib.suppress(ConnectionResetError):  # not all that it had sent was read
            assert half.recv(1) == b""
    assert any("did not prove within 0.2 s that it is a rank of this run" in line for line in waiting.meeting.lines)


@pytest.mark.parametrize("meeting", ["tcp"], indirect=True)
def test_the_position_of_a_rank_that_is_here_is_taken(meeting: Meeting) -> None:
    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(meeting.join, 0, 3, setup_timeout=0.5)
        found = RankAddress(*json.loads(meeting.get("link/0")))
        with socket.create_connection((found.address, found.port)) as first:
            first.sendall(make_hello(ConnectionId("run", 1, 0), bytes.fromhex(found.token)))
            assert len(first.recv(100)) == ANSWER_BYTES
            with socket.create_connection((found.address, found.port)) as second:
                second.sendall(make_hello(ConnectionId("run", 1, 0), bytes.fromhex(found.token)))
                assert second.recv(100) == b""
        with pytest.raises(UnreachableError, match="rank 1 has not published its address"):
            zero.result(PATIENCE)
    assert "claims to be rank 1, which is already connected" in meeting.lines[0]


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "HANDSHAKE_SECONDS", 10 * PATIENCE)


def test_more_connections_than_are_heard_at_a_time_keep_nobody_out(endless: None, waiting: Waiting) -> None:
    waiting.held += [waiting.connect() for _ in range(3 * MAX_PENDING)]


def test_random_input_ends_nobody(waiting: Waiting) -> None:
    attack(waiting.found, 150, draw_seed("strangers"), is_local=bool(waiting.found.unix_socket_name))


def test_ranks_that_do_not_come_are_named(meeting: Meeting) -> None:
    with pytest.raises(UnreachableError, match="rank 1 has not published its address"):
        meeting.join(0, 2, setup_timeout=0.1)
    one = RankAddress("127.0.0.1", 1, "00", "", "")
    meeting.set("link/1", json.dumps(one))
    told = "rank 0 cannot connect to rank 1 at 127.0.0.1:1: Connection refused; see the log of rank 1, check"
    with pytest.raises(UnreachableError, match=told):
        meeting.join(0, 2, setup_timeout=0.1)
