"""A key and a certificate for each attempt, and TLS contexts that accept nothing else. Imports no torch.

All ranks of an attempt share one self-signed certificate, which both sides of a connection show and expect: whoever can
read the folder is a rank. Python's ssl cannot make certificates; the `openssl` program can. TLS 1.3 only (RFC 8446).
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

from common.core.errors import UserError, summarize_error
from common.distributed.transport.socket_stream import TlsSocket
from common.distributed.transport.welcome import Stranger

KEY, CERTIFICATE = "key.pem", "certificate.pem"
SKEW = 3600.0  # seconds by which the clocks of hosts may differ: a certificate is valid so much earlier and longer
FOREIGN, EXPIRED, SILENT = (
    "shows a certificate of another run",
    "shows a certificate that has expired, or is not yet valid",
    "shows no certificate",
)
CONFIG = """
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
    """TLS contexts and certificate by which a rank connects as a member of its attempt."""

    client: ssl.SSLContext
    server: ssl.SSLContext
    certificate: bytes
    """The one certificate that both sides show, in DER."""


# ---- making


def make_identity(folder: Path, seconds: float, start: float | None = None) -> None:
    """Make a key and a certificate for so many seconds from now (or from `start`, a Unix time) in a new private folder.

    What is in the folder is replaced. Raises UserError, such as where the `openssl` program is missing.
    """
    begin = time.time() if start is None else start
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))  # mode 0700
    try:
        (staging / "config").write_text(CONFIG)
        (staging / "index").touch()
        run_openssl(staging, "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-out", KEY)
        run_openssl(staging, "req", "-new", "-config", "config", "-key", KEY, "-out", "request")
        dates = ["-startdate", format_date(begin - SKEW), "-enddate", format_date(begin + seconds + SKEW)]
        files = ["-config", "config", "-keyfile", KEY, "-in", "request", "-out", CERTIFICATE]
        # not `req -x509`, which knows no earlier start before OpenSSL 3.4
        run_openssl(staging, "ca", "-selfsign", "-batch", "-notext", *files, *dates)
        for left in staging.iterdir():
            if left.name not in (KEY, CERTIFICATE):
                left.unlink()
        (staging / KEY).chmod(0o600)
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)
    except OSError as error:
        raise UserError(f"no key could be written to {folder}: {summarize_error(error)}") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_openssl() -> None:
    """Raise UserError where the openssl program is missing."""
    if shutil.which("openssl") is None:
        raise UserError(
            f"launch.tls=true needs the openssl program, which {socket.gethostname()} does not have; install it, or "
            "use launch.tls=false on a trusted network"
        )


def run_openssl(folder: Path, *words: str) -> None:
    """Run the openssl program in a folder. Raises UserError."""
    check_openssl()
    try:
        done = subprocess.run(
            ["openssl", *words], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError(f"openssl {words[0]} has not ended after 60 s; try `openssl version` by hand") from None
    if done.returncode:
        told = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        raise UserError(f"openssl {words[0]} made no certificate: {told[-1]}; see `openssl version`: 1.1.1 is needed")


def format_date(moment: float) -> str:
    """Return a Unix time as a certificate's date."""
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).strftime("%Y%m%d%H%M%SZ")


# ---- using


def load_identity(folder: Path) -> Identity:
    """Load what `make_identity` made. Raises UserError if it is missing, open to others, damaged or out of date."""
    key, certificate = folder / KEY, folder / CERTIFICATE
    client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if (folder.stat().st_mode | key.stat().st_mode) & 0o077:
            raise UserError(f"{key} can be read by others: chmod 700 {folder}, chmod 600 {key}, and start anew")
        for context in (client, server):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # the certificate itself is compared
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(certificate, key)
            context.load_verify_locations(certificate)
        server.num_tickets = 0  # nobody resumes; unread tickets would reset a connection that is closed
        own = ssl.PEM_cert_to_DER_cert(certificate.read_text())
    except ssl.SSLError as error:
        raise UserError(f"the certificate in {folder} is damaged ({error.reason}); start again") from None
    except (OSError, ValueError) as error:
        raise UserError(f"no certificate in {folder}: {summarize_error(error)}; start again") from None
    (facts,) = client.get_ca_certs()
    begin, end = (ssl.cert_time_to_seconds(str(facts[name])) for name in ("notBefore", "notAfter"))
    if not begin <= time.time() <= end:
        now = time.strftime("%b %d %H:%M:%S %Y GMT", time.gmtime())
        raise UserError(
            f"the certificate in {folder} is valid from {facts['notBefore']} to {facts['notAfter']}, and on "
            f"{socket.gethostname()} it is {now}; check the clock, or start again"
        )
    return Identity(client, server, own)


def check_peer(connection: TlsSocket, identity: Identity) -> None:
    """Raise Stranger unless the other side has shown this run's own certificate."""
    if connection.get_certificate() != identity.certificate:
        raise Stranger(FOREIGN)


def describe_refusal(error: Exception) -> str:
    """Return what is wrong with the other side of a connection that failed, as the end of `which ...`."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return EXPIRED if error.verify_code in (9, 10) else FOREIGN  # X509_V_ERR_CERT_NOT_YET_VALID, _HAS_EXPIRED
    if isinstance(error, ssl.SSLError):
        reason = str(error.reason)
        if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return SILENT
        if "ALERT" in reason and ("CA" in reason.split("_") or "CERT" in reason):
            return "does not accept this run's certificate"
        return f"does not speak TLS 1.3 ({reason.lower().replace('_', ' ')})"
    if isinstance(error, ConnectionError):
        return "left before it had said who it is"
    return f"broke off: {summarize_error(error)}"
