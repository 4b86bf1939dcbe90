"""Keys and certificates of an attempt: private, for a limited time, and no others are accepted on either side."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.backend.certificates import Identity, create_identity_files, load_identity
from common.ranks.links.connecting import RankAddress, RankLinks
from common.system.causes import Cause
from common.system.errors import UnreachableError, UserError
from tests.harness.file_limit import limit_file_size
from tests.harness.processes import PATIENCE, wait_until
from tests.harness.transport import Meeting, identity

__all__ = ["identity"]
HOUR = 3600.0


def test_they_are_private_and_hosts_may_differ_by_an_hour(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    create_identity_files(folder, HOUR)
    assert [folder.stat().st_mode & 0o777, (folder / "key.pem").stat().st_mode & 0o777] == [0o700, 0o600]
    assert sorted(path.name for path in folder.iterdir()) == ["certificate.pem", "key.pem"]
    (facts,) = load_identity(folder).client.get_ca_certs()
    begin, end = (ssl.cert_time_to_seconds(str(facts[name])) for name in ("notBefore", "notAfter"))
    now = time.time()
    assert begin < now - 0.9 * HOUR and now + 1.9 * HOUR < end < now + 2.1 * HOUR
    first = (folder / "key.pem").read_text()
    create_identity_files(folder, HOUR)
    assert (folder / "key.pem").read_text() != first and list(tmp_path.iterdir()) == [folder]


def test_without_openssl_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"requires the openssl program, which is not installed on .*; install openssl"):
        create_identity_files(tmp_path / "tls", HOUR)
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_cannot_be_written_has_a_cause(tmp_path: Path) -> None:
    with limit_file_size(0), pytest.raises(UserError, match=r"cannot write .*tls: .*; raise the limit") as caught:
        create_identity_files(tmp_path / "tls", HOUR)
    assert caught.value.cause is Cause.FILE_TOO_LARGE and list(tmp_path.iterdir()) == []


def expire(folder: Path) -> None:
    create_identity_files(folder, 1, start=time.time() - 10 * HOUR)


def begin_tomorrow(folder: Path) -> None:
    create_identity_files(folder, HOUR, start=time.time() + 24 * HOUR)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda folder: (folder / "key.pem").unlink(), r"cannot load the certificate in .*: No such file or directory"),
        (lambda folder: (folder / "certificate.pem").write_text("x"), "the certificate in .* is damaged"),
        (lambda folder: folder.chmod(0o755), "key.pem is readable by other users; run chmod 700"),
        (lambda folder: (folder / "key.pem").chmod(0o640), "key.pem is readable by other users; run chmod 700"),
        (expire, "is valid from .* to .*, but the clock of .* shows .*; check the clock, or restart the run"),
        (begin_tomorrow, "is valid from .* to .*, but the clock of .* shows .*; check the clock, or restart the run"),
    ],
    ids=["missing", "damaged", "folder", "key", "expired", "early"],
)
def test_what_cannot_be_used_is_told(tmp_path: Path, spoil: Callable[[Path], object], told: str) -> None:
    create_identity_files(tmp_path / "tls", HOUR)
    spoil(tmp_path / "tls")
    with pytest.raises(UserError, match=told):
        load_identity(tmp_path / "tls")


def connect_as(context: ssl.SSLContext | None, found: RankAddress) -> str:
    """Connect to a rank by TLS or in plain TCP; returns how it ends."""
    with socket.create_connection((found.address, found.port), PATIENCE) as plain:
        try:
            if context is None:
                plain.sendall(b"x" * 100)
                return str(plain.recv(100))
            with context.wrap_socket(plain) as stranger:
                return str(stranger.recv(100))
        except OSError as error:
            return str(error)


def test_strangers_with_other_certificates_or_none_are_refused(identity: Identity, tmp_path: Path) -> None:
    create_identity_files(tmp_path / "other", HOUR)
    other = load_identity(tmp_path / "other")
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    careless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
    careless.load_cert_chain(tmp_path / "other" / "certificate.pem", tmp_path / "other" / "key.pem")
    ways: list[tuple[ssl.SSLContext | None, str]] = [
        (None, "does not speak TLS 1.3"),
        (other.client, "does not accept this run's certificate"),
        (bare, "did not present a certificate"),
        (careless, "presented a certificate of another run"),
    ]
    for context, reason in ways:
        meeting = Meeting(tmp_path / reason.replace(" ", "-"), identity=identity)
        with ThreadPoolExecutor(1) as pool:
            zero = pool.submit(meeting.join, 0, 2)
            found = RankAddress(*json.loads(meeting.get("link/0")))
            ended = connect_as(context, found)
            wait_until(lambda meeting=meeting: meeting.lines, "a line about the stranger")  # type: ignore[misc]
            (line,) = meeting.lines
            assert f"rank 0 rejected a connection from {found.address}:" in line and reason in line, (line, ended)
            close(zero.result, meeting)


def close(result: Callable[[float], RankLinks], meeting: Meeting) -> None:
    """Let the right rank 1 come, and close both."""
    one = meeting.join(1, 2)
    for links in (one, result(PATIENCE)):
        links.close()


def test_a_rank_waits_when_a_stranger_answers_in_place_of_another(identity: Identity, tmp_path: Path) -> None:
    create_identity_files(tmp_path / "other", HOUR)
    other = load_identity(tmp_path / "other")
    meeting = Meeting(tmp_path / "meeting", identity=identity)
    reason = "presented a certificate of another run"
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        port = listener.getsockname()[1]
        meeting.set("link/1", json.dumps(RankAddress("127.0.0.1", port, "00", "", "")))
        waiting = pool.submit(meeting.join, 0, 2, setup_timeout=0.5)
        while not waiting.done():
            listener.settimeout(0.1)
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                connection.settimeout(PATIENCE)
                other.server.wrap_socket(connection, server_side=True).close()
        with pytest.raises(UnreachableError, match=f"at 127.0.0.1:{port}: the peer {reason}"):
            waiting.result()
    assert meeting.lines == [f"rank 0 is waiting for rank 1 at 127.0.0.1:{port}: the peer {reason}"]
