"""Keys and certificates of an attempt: privacy, validity, and rejection of certificates of other runs."""

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
from common.ranks.links.connecting import RankAddress
from common.system.causes import Cause
from common.system.errors import UnreachableError, UserError
from tests.harness.commands.processes import WAIT_TIMEOUT, wait_until
from tests.harness.environment.size_limit import limit_file_size
from tests.harness.ranks.folder_rendezvous import FolderRendezvous, identity

__all__ = ["identity"]  # fixture
HOUR = 3600.0


def test_files_are_private_and_clocks_may_differ_by_an_hour(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    key_file = folder / "key.pem"
    create_identity_files(folder, HOUR)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert key_file.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in folder.iterdir()) == ["certificate.pem", "key.pem"]

    (certificate,) = load_identity(folder).client.get_ca_certs()
    start = ssl.cert_time_to_seconds(str(certificate["notBefore"]))
    end = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
    now = time.time()
    assert start < now - 0.9 * HOUR
    assert now + 1.9 * HOUR < end < now + 2.1 * HOUR

    old_key = key_file.read_text()
    create_identity_files(folder, HOUR)
    assert key_file.read_text() != old_key
    assert list(tmp_path.iterdir()) == [folder]


def test_missing_openssl_is_reported_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"requires the openssl program, which is not installed on .*; install openssl"):
        create_identity_files(tmp_path / "tls", HOUR)
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_cannot_be_written_has_a_cause(tmp_path: Path) -> None:
    with limit_file_size(0), pytest.raises(UserError, match=r"cannot write .*tls: .*; raise the limit") as caught:
        create_identity_files(tmp_path / "tls", HOUR)
    assert caught.value.cause is Cause.FILE_TOO_LARGE
    assert list(tmp_path.iterdir()) == []


def create_expired_certificate(folder: Path) -> None:
    create_identity_files(folder, 1, start=time.time() - 10 * HOUR)


def create_certificate_for_tomorrow(folder: Path) -> None:
    create_identity_files(folder, HOUR, start=time.time() + 24 * HOUR)


READABLE = "key.pem is readable by other users; run chmod 700"
OUTSIDE_VALIDITY = "is valid from .* to .*, but the clock of .* shows .*; check the clock, or restart the run"


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda folder: (folder / "key.pem").unlink(), r"cannot load the certificate in .*: No such file or directory"),
        (lambda folder: (folder / "certificate.pem").write_text("x"), "the certificate in .* is damaged"),
        (lambda folder: folder.chmod(0o755), READABLE),
        (lambda folder: (folder / "key.pem").chmod(0o640), READABLE),
        (create_expired_certificate, OUTSIDE_VALIDITY),
        (create_certificate_for_tomorrow, OUTSIDE_VALIDITY),
    ],
    ids=["missing", "damaged", "folder", "key", "expired", "early"],
)
def test_an_unusable_certificate_is_refused(tmp_path: Path, spoil: Callable[[Path], object], message: str) -> None:
    folder = tmp_path / "tls"
    create_identity_files(folder, HOUR)
    spoil(folder)
    with pytest.raises(UserError, match=message):
        load_identity(folder)


@pytest.fixture(scope="module")
def foreign_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the key and the certificate of another run."""
    folder = tmp_path_factory.mktemp("foreign") / "tls"
    create_identity_files(folder, HOUR)
    return folder


def connect_to_rank(context: ssl.SSLContext | None, rank_address: RankAddress) -> str:
    """Connect to a rank with TLS or, without context, with plain TCP; return the answer or the error."""
    with socket.create_connection((rank_address.address, rank_address.port), WAIT_TIMEOUT) as connection:
        try:
            if context is None:
                connection.sendall(b"x" * 100)
                return str(connection.recv(100))
            with context.wrap_socket(connection) as tls_connection:
                return str(tls_connection.recv(100))
        except OSError as error:
            return str(error)


def make_unverifying_context() -> ssl.SSLContext:
    """Return a TLS client context that accepts each certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


REJECTED_CLIENTS = {
    "plain": "does not speak TLS 1.3",
    "verifying": "does not accept this run's certificate",
    "without certificate": "did not present a certificate",
    "with certificate": "presented a certificate of another run",
}


@pytest.mark.parametrize("kind, reason", REJECTED_CLIENTS.items())
def test_clients_of_other_runs_are_rejected(
    kind: str, reason: str, identity: Identity, foreign_folder: Path, tmp_path: Path
) -> None:
    contexts: dict[str, ssl.SSLContext | None] = {
        "plain": None,
        "verifying": load_identity(foreign_folder).client,
        "without certificate": make_unverifying_context(),
        "with certificate": make_unverifying_context(),
    }
    with_certificate = contexts["with certificate"]
    assert with_certificate is not None
    with_certificate.load_cert_chain(foreign_folder / "certificate.pem", foreign_folder / "key.pem")

    rendezvous = FolderRendezvous(tmp_path / "rendezvous", identity=identity)
    with ThreadPoolExecutor(1) as pool:
        rank_0 = pool.submit(rendezvous.join, 0, 2)
        rank_address = RankAddress(*json.loads(rendezvous.get("link/0")))
        answer = connect_to_rank(contexts[kind], rank_address)
        wait_until(lambda: rendezvous.warnings, "a warning about the client")
        (warning,) = rendezvous.warnings
        assert f"rank 0 rejected a connection from {rank_address.address}:" in warning, (warning, answer)
        assert reason in warning, (warning, answer)
        rank_1 = rendezvous.join(1, 2)
        rank_1.close()
        rank_0.result(WAIT_TIMEOUT).close()


def test_a_rank_waits_if_another_run_answers(identity: Identity, foreign_folder: Path, tmp_path: Path) -> None:
    foreign_identity = load_identity(foreign_folder)
    rendezvous = FolderRendezvous(tmp_path / "rendezvous", identity=identity)
    reason = "presented a certificate of another run"
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(0.1)
        port = listener.getsockname()[1]
        rendezvous.set("link/1", json.dumps(RankAddress("127.0.0.1", port, "00", "", "")))
        rank_0 = pool.submit(rendezvous.join, 0, 2, setup_timeout=0.5)
        while not rank_0.done():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                connection.settimeout(WAIT_TIMEOUT)
                foreign_identity.server.wrap_socket(connection, server_side=True).close()
        with pytest.raises(UnreachableError, match=f"at 127.0.0.1:{port}: the peer {reason}"):
            rank_0.result()
    assert rendezvous.warnings == [f"rank 0 is waiting for rank 1 at 127.0.0.1:{port}: the peer {reason}"]
