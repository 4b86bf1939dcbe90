"""Create and load the key and the certificate of an attempt, and the TLS contexts that accept only this certificate.

All ranks of an attempt share one self-signed certificate. Both sides of a connection present this certificate and
require it from the peer, so any process that can read the key file is accepted as a rank. The certificate is created by
the `openssl` program, because Python's ssl module cannot create certificates. Only TLS 1.3 (RFC 8446) is allowed. This
module does not import torch.
"""

from __future__ import annotations

import datetime
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from common.backend.tls import TlsSocket, TlsStream
from common.ranks.links.welcome import UntrustedPeer
from common.runs.folder import convert_disk_errors
from common.system import foreign_text
from common.system.disk_problems import DISK_PROBLEMS
from common.system.errors import UserError, summarize_error

KEY_FILE = "key.pem"
CERTIFICATE_FILE = "certificate.pem"
CLOCK_SKEW_SECONDS = 3600.0  # tolerated clock difference between hosts; extends the validity period at both ends
OPENSSL_TIMEOUT = 60  # seconds
FOREIGN_CERTIFICATE = "presented a certificate of another run"
EXPIRED_CERTIFICATE = "presented a certificate that has expired or is not yet valid"
NO_CERTIFICATE = "did not present a certificate"
OPENSSL_CONFIG = """
[req]
distinguished_name = name
prompt = no
[name]
CN = rank
[ca]
default_ca = own
[own]
database = index
new_certs_dir = .
rand_serial = yes
default_md = sha256
policy = any
x509_extensions = extensions
[any]
commonName = supplied
[extensions]
basicConstraints = critical, CA:TRUE
keyUsage = critical, digitalSignature, keyCertSign
subjectKeyIdentifier = hash
"""


class Identity(NamedTuple):
    """TLS contexts and certificate that a rank uses to connect to other ranks of the same attempt."""

    client: ssl.SSLContext
    server: ssl.SSLContext
    certificate: bytes
    """Certificate that both sides of a connection present, in DER encoding."""

    def open_client(self, connection: socket.socket) -> TlsSocket:
        """Take over a connection and perform the TLS handshake as a client.

        Raises OSError, or UntrustedPeer if the peer did not present this run's certificate.
        """
        tls_socket = TlsSocket(connection, self.client)
        try:
            self.continue_handshake(tls_socket)
        except BaseException:
            tls_socket.close()
            raise
        return tls_socket

    def open_server(self, connection: socket.socket) -> TlsSocket:
        """Take over a non-blocking connection, whose handshake `continue_handshake` performs."""
        return TlsSocket(connection, self.server, server_side=True)

    def continue_handshake(self, connection: socket.socket) -> None:
        """Continue the handshake of a connection and check the certificate of the peer.

        Raises BlockingIOError if the handshake is not complete yet, OSError if it fails, and UntrustedPeer if the peer
        did not present this run's certificate.
        """
        assert isinstance(connection, TlsSocket)
        connection.do_handshake()
        if connection.get_certificate() != self.certificate:
            raise UntrustedPeer(FOREIGN_CERTIFICATE)

    def describe_failure(self, error: Exception) -> str:
        """Return why the TLS handshake with a peer failed; an empty string for an error that is not related to TLS.

        The returned text completes a sentence that starts with `the peer`.
        """
        if isinstance(error, ssl.SSLCertVerificationError):
            # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
            return EXPIRED_CERTIFICATE if error.verify_code in (9, 10) else FOREIGN_CERTIFICATE
        if not isinstance(error, ssl.SSLError):
            return ""
        reason = str(error.reason)
        if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return NO_CERTIFICATE
        if "ALERT" in reason and ("CA" in reason.split("_") or "CERT" in reason):
            return "does not accept this run's certificate"
        return f"does not speak TLS 1.3 ({reason.lower().replace('_', ' ')})"

    def make_stream(self, connection: socket.socket, timeout: float) -> TlsStream:
        """Return a stream that encrypts the messages of a connection."""
        assert isinstance(connection, TlsSocket)
        return TlsStream(connection, timeout)


# ---- creating


def create_identity_files(folder: Path, seconds: float, start: float | None = None) -> None:
    """Create a key and a certificate in a private folder, replacing the folder if it exists.

    The certificate is valid for `seconds`, starting now or at `start` (Unix time). Raises UserError if the files cannot
    be created, for example because the `openssl` program is not installed.
    """
    begin = time.time() if start is None else start
    with convert_disk_errors(folder):
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))  # created with mode 0700
    try:
        with convert_disk_errors(folder):
            create_certificate(staging, begin - CLOCK_SKEW_SECONDS, begin + seconds + CLOCK_SKEW_SECONDS)
            shutil.rmtree(folder, ignore_errors=True)
            staging.rename(folder)
    except OSError as error:
        raise UserError(f"cannot write the TLS key to {folder}: {summarize_error(error)}; check the disk") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def create_certificate(folder: Path, begin: float, end: float) -> None:
    """Create a key and a certificate in an empty folder.

    The certificate is valid from `begin` to `end` (Unix times). Raises OSError or UserError.
    """
    (folder / "config").write_text(OPENSSL_CONFIG)
    (folder / "index").touch()
    run_openssl(folder, "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-out", KEY_FILE)
    run_openssl(folder, "req", "-new", "-config", "config", "-key", KEY_FILE, "-out", "request")
    files = ["-config", "config", "-keyfile", KEY_FILE, "-in", "request", "-out", CERTIFICATE_FILE]
    dates = ["-startdate", format_certificate_date(begin), "-enddate", format_certificate_date(end)]
    # `openssl req -x509` does not support a start date before OpenSSL 3.4
    run_openssl(folder, "ca", "-selfsign", "-batch", "-notext", *files, *dates)
    for file in folder.iterdir():
        if file.name not in (KEY_FILE, CERTIFICATE_FILE):
            file.unlink()
    (folder / KEY_FILE).chmod(0o600)


def check_openssl_is_installed() -> None:
    """Raise UserError if the openssl program is not installed."""
    if shutil.which("openssl") is None:
        raise UserError(
            f"launch.tls=true requires the openssl program, which is not installed on {socket.gethostname()}; install "
            "openssl, or set launch.tls=false on a trusted network"
        )


def run_openssl(folder: Path, command: str, *arguments: str) -> None:
    """Run an openssl command in a folder. Raises UserError if the command fails."""
    check_openssl_is_installed()
    try:
        process = subprocess.run(
            ["openssl", command, *arguments], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=OPENSSL_TIMEOUT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError(
            f"openssl {command} did not finish within {OPENSSL_TIMEOUT} s; run `openssl version` to check the program"
        ) from None
    if process.returncode:
        lines = process.stderr.strip().splitlines() or [f"exit status {process.returncode}"]
        cause = foreign_text.classify_text("\n".join(lines))
        remedy = DISK_PROBLEMS.get(cause, "check that `openssl version` is at least 1.1.1")
        raise UserError(f"openssl {command} failed: {lines[-1]}; {remedy}", cause=cause)


def format_certificate_date(moment: float) -> str:
    """Format a Unix time as a date in the format of the openssl program."""
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).strftime("%Y%m%d%H%M%SZ")


# ---- using


def load_identity(folder: Path) -> Identity:
    """Load the key and the certificate that `create_identity_files` created.

    Raises UserError if a file is missing, damaged or readable by other users, or if the certificate is not valid now.
    """
    key_file = folder / KEY_FILE
    certificate_file = folder / CERTIFICATE_FILE
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if (folder.stat().st_mode | key_file.stat().st_mode) & 0o077:
            raise UserError(
                f"{key_file} is readable by other users; run chmod 700 {folder} and chmod 600 {key_file}, then "
                "restart the run"
            )
        for context in (client, server):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # check_peer_certificate compares the whole certificate
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(certificate_file, key_file)
            context.load_verify_locations(certificate_file)
        server.num_tickets = 0  # sessions are never resumed, and unread tickets would reset a closing connection
        certificate = ssl.PEM_cert_to_DER_cert(certificate_file.read_text())
    except ssl.SSLError as error:
        raise UserError(f"the certificate in {folder} is damaged ({error.reason}); restart the run") from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load the certificate in {folder}: {summarize_error(error)}; restart the run") from None
    check_certificate_validity(client, folder)
    return Identity(client, server, certificate)


def check_certificate_validity(context: ssl.SSLContext, folder: Path) -> None:
    """Raise UserError if the certificate of a TLS context is not valid now."""
    (fields,) = context.get_ca_certs()
    first = str(fields["notBefore"])
    last = str(fields["notAfter"])
    if not ssl.cert_time_to_seconds(first) <= time.time() <= ssl.cert_time_to_seconds(last):
        now = time.strftime("%b %d %H:%M:%S %Y GMT", time.gmtime())
        raise UserError(
            f"the certificate in {folder} is valid from {first} to {last}, but the clock of {socket.gethostname()} "
            f"shows {now}; check the clock, or restart the run"
        )
