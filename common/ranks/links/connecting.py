"""Connect all ranks of a group with each other, with one connection per direction.

Each rank opens a port that the kernel chooses, publishes the port and a random token through the rendezvous, and
connects to all other ranks. A connection is accepted once both sides have proven that they belong to the group (see
welcome.py). This module does not import torch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from common.ranks.links.encryption import Encryption
from common.ranks.links.incoming import IncomingLink
from common.ranks.links.memory_stream import MemoryStream
from common.ranks.links.outgoing import OutgoingLink
from common.ranks.links.reception import RankAcceptor, Warn, read_peer_user_id
from common.ranks.links.socket_stream import SocketStream, pack_timeval
from common.ranks.links.welcome import ANSWER_BYTES, ConnectionId, UntrustedPeer, make_hello, make_hello_answer
from common.system import network
from common.system.errors import UnreachableError, summarize_error

RETRY_SECONDS = 0.05  # pause between two connection attempts
Lookup = Callable[[str], str | bytes]


class RankLinks(NamedTuple):
    """The links between one rank and all of its peers, keyed by peer rank."""

    outgoing: dict[int, OutgoingLink]
    incoming: dict[int, IncomingLink]

    def close(self) -> None:
        """Close all links, so that waiting threads fail immediately.

        Messages for which `OutgoingLink.wait_until_written` has returned are still delivered.
        """
        for link in (*self.outgoing.values(), *self.incoming.values()):
            link.close()


class RankAddress(NamedTuple):
    """Network address, host name and token that a rank publishes through the rendezvous."""

    address: str
    port: int
    token: str
    host: str
    unix_socket_name: str
    """Abstract name of the Unix socket for ranks on the same host; empty if there is no such socket."""


def print_warning(line: str) -> None:
    """Print a warning line to stderr."""
    print(line, file=sys.stderr, flush=True)


def connect_ranks(
    rank: int,
    size: int,
    publish: Callable[[str, str], object],
    lookup: Lookup,
    *,
    group: str,
    address: str,
    setup_timeout: float,
    timeout: float,
    identity: Encryption | None = None,
    host: str = "",
    polling_seconds: float = 0.0,
    warn: Warn = print_warning,
    names: Sequence[int] = (),
) -> RankLinks:
    """Connect all ranks of a group with each other. All ranks must call this function.

    `publish(key, value)` and the blocking `lookup(key)` access the rendezvous; for example, they can be the `set` and
    `get` methods of a store. `group` is a string that identifies the run, the attempt and the group. `address` is the
    IPv4 address of this rank's network interface. `setup_timeout` is the time limit of this call in seconds. After
    `timeout` seconds without progress, sending or receiving a message fails. If `identity` is given, all connections
    between hosts are encrypted. Ranks that pass the same `host` are connected through shared memory (memory_stream.py).
    A rank that waits for shared memory polls for `polling_seconds` before it sleeps. `warn` prints a warning. `names`
    contains the number by which the links and their errors name each rank, by default the rank itself. Raises
    UnreachableError if a rank cannot be connected.
    """
    if size == 1:
        return RankLinks({}, {})
    deadline = time.monotonic() + setup_timeout
    token = secrets.token_bytes(16)
    is_local = bool(host) and sys.platform == "linux"
    acceptor = RankAcceptor(
        group, rank, size, token=token, address=address, is_local=is_local, identity=identity, warn=warn
    )
    open_stream = functools.partial(make_stream, timeout=timeout, polling_seconds=polling_seconds, identity=identity)
    links = RankLinks({}, {})
    try:
        published = RankAddress(address, acceptor.port, token.hex(), host, acceptor.unix_socket_name)
        publish(f"link/{rank}", json.dumps(published))
        for step in range(1, size):  # each rank starts with a different peer, to spread the load
            peer = (rank + step) % size
            target = wait_for_rank_address(peer, lookup)
            if target.host != host:
                target = target._replace(unix_socket_name="")
            connection = connect_to_rank(ConnectionId(group, rank, peer), target, deadline, identity, warn)
            name = names[peer] if names else peer
            links.outgoing[name] = OutgoingLink(open_stream(connection), name)
        for peer, connection in acceptor.wait_for_ranks(deadline).items():
            name = names[peer] if names else peer
            links.incoming[name] = IncomingLink(open_stream(connection), name)
    except BaseException:
        links.close()
        raise
    finally:
        acceptor.close()
    return links


def make_stream(
    connection: socket.socket, timeout: float, polling_seconds: float, identity: Encryption | None
) -> SocketStream:
    """Return a `MemoryStream` for a Unix socket, or a `SocketStream`, which may be encrypted, for any other socket."""
    if connection.family == socket.AF_UNIX:
        return MemoryStream(connection, timeout, polling_seconds)
    if identity:
        return identity.make_stream(connection, timeout)
    return SocketStream(connection, timeout)


def wait_for_rank_address(peer: int, lookup: Lookup) -> RankAddress:
    """Wait until a rank has published its address and return the address. Raises UnreachableError."""
    try:
        return RankAddress(*json.loads(lookup(f"link/{peer}")))
    except (RuntimeError, OSError, ValueError, TypeError) as error:  # torch's stores raise RuntimeError
        raise UnreachableError(
            f"rank {peer} has not published its address: {summarize_error(error)}; see the log of rank {peer}, or "
            "raise launch.setup_timeout"
        ) from None


def connect_to_rank(
    direction: ConnectionId,
    target: RankAddress,
    deadline: float,
    identity: Encryption | None,
    warn: Warn,
) -> socket.socket:
    """Connect to a rank, retrying until the connection is accepted. Raises UnreachableError after the deadline."""
    start = time.monotonic()
    last_reason = ""
    description = f"rank {direction.target} at {target.address}:{target.port}"
    while True:
        limit = deadline
        try:
            return try_to_connect(direction, target, deadline, identity)
        except UntrustedPeer as error:
            reason = f"the peer {error}"
        except OSError as error:
            reason = summarize_error(error)
            tls_failure = identity.describe_failure(error) if identity else ""
            if tls_failure:
                reason = f"the peer {tls_failure}"
            elif isinstance(error, TimeoutError):
                reason = last_reason or "the peer does not answer"
            # An overloaded rank resets connections and may accept a later attempt. After any other error, waiting long
            # is useless, because a rank opens its port before publishing the port number.
            if not tls_failure and not isinstance(error, ConnectionResetError | BrokenPipeError):
                limit = min(deadline, start + network.UNREACHABLE_SECONDS)
        if time.monotonic() > limit:
            remedy = "raise launch.setup_timeout" if limit == deadline else "set launch.interface"
            raise UnreachableError(
                f"rank {direction.source} cannot connect to {description}: {reason}; see the log of rank "
                f"{direction.target}, check the firewall, or {remedy}"
            )
        if reason != last_reason:
            last_reason = reason
            warn(f"rank {direction.source} is waiting for {description}: {reason}")
        time.sleep(RETRY_SECONDS)


def try_to_connect(
    direction: ConnectionId, target: RankAddress, deadline: float, identity: Encryption | None
) -> socket.socket:
    """Try once to connect to a rank and to perform the handshake.

    Raises OSError or UntrustedPeer.
    """
    remaining = max(RETRY_SECONDS, deadline - time.monotonic())
    connection = connect_to_local_rank(target.unix_socket_name, remaining) if target.unix_socket_name else None
    if connection is None:
        timeout = min(remaining, network.UNREACHABLE_SECONDS)
        connection = socket.create_connection((target.address, target.port), timeout=timeout)
    connection.settimeout(remaining)
    try:
        if identity and connection.family != socket.AF_UNIX:
            connection = identity.open_client(connection)
        exchange_proofs(connection, direction, bytes.fromhex(target.token))
    except BaseException:
        connection.close()
        raise
    return connection


def exchange_proofs(connection: socket.socket, direction: ConnectionId, token: bytes) -> None:
    """Prove this rank's identity to the peer and check the peer's answer.

    Raises UntrustedPeer if the answer is wrong, and OSError if the connection fails.
    """
    connection.sendall(make_hello(direction, token))
    answer = b""
    while len(answer) < ANSWER_BYTES:
        data = connection.recv(ANSWER_BYTES - len(answer))
        if not data:
            raise ConnectionResetError("the peer closed the connection during the handshake; its log shows the reason")
        answer += data
    if not secrets.compare_digest(answer, make_hello_answer(direction, token)):
        raise UntrustedPeer("gave a wrong answer in the handshake; the port may belong to another program")


def connect_to_local_rank(name: str, seconds: float) -> socket.socket | None:
    """Connect to a rank on this host through its Unix socket.

    Return None if no process of this user listens on the socket. This can happen if two hosts have the same name.
    """
    connection = socket.socket(socket.AF_UNIX)
    # with a Python timeout, connect() would fail immediately instead of waiting if the kernel's queue is full
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, pack_timeval(seconds))
    with contextlib.suppress(OSError):
        connection.connect("\0" + name)
        if read_peer_user_id(connection) == os.getuid():
            return connection
    connection.close()
    return None
