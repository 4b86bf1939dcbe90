"""Connections between all ranks of a group, one for each direction. Imports no torch.

Each rank opens a port that the kernel chooses, publishes it with a random token through the rendezvous, and connects to
all others. A connection counts when both sides have proven that they belong to this group (welcome.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import ssl
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from common.core import network
from common.core.errors import Unreachable, summarize_error
from common.distributed.transport.certificates import Identity, check_peer, describe_refusal
from common.distributed.transport.incoming import Incoming
from common.distributed.transport.links import Outgoing
from common.distributed.transport.memory_links import MemoryStream
from common.distributed.transport.reception import Reception, read_peer_user_id
from common.distributed.transport.socket_stream import SocketStream, TlsSocket, pack_seconds
from common.distributed.transport.welcome import ANSWER, Direction, Stranger, make_answer, make_hello

RETRY = 0.05  # seconds between two attempts to connect


class Links(NamedTuple):
    """The links of one rank, by the other rank."""

    outgoing: dict[int, Outgoing]
    incoming: dict[int, Incoming]

    def close(self) -> None:
        """End all links, and at once whatever waits for them. What was sent and waited for still arrives."""
        for link in (*self.outgoing.values(), *self.incoming.values()):
            link.close()


class Published(NamedTuple):
    """Address, host and token of a rank, as it publishes them."""

    address: str
    port: int
    token: str
    host: str
    local: str
    """Abstract name of a Unix socket for ranks of the same host, empty if there is none."""


def print_warning(line: str) -> None:
    """Print a line to stderr."""
    print(line, file=sys.stderr, flush=True)


def connect_ranks(
    rank: int,
    size: int,
    publish: Callable[[str, str], object],
    lookup: Callable[[str], str | bytes],
    *,
    group: str,
    address: str,
    setup_timeout: float,
    timeout: float,
    identity: Identity | None = None,
    host: str = "",
    spin: float = 0.0,
    tell: Callable[[str], object] = print_warning,
) -> Links:
    """Connect the ranks of a group with each other; all of them call it.

    `publish(key, value)` and `lookup(key)`, which waits, are those of the rendezvous, such as `set` and `get` of a
    store of this group. `group` names run, attempt and group; `address` is the IPv4 address of this rank's network
    interface. `setup_timeout` seconds are for this call, `timeout` seconds without progress for each message.
    With an identity all connections between hosts are TLS. Ranks that give the same name of their host are connected
    through its memory (memory_links.py), and poll for `spin` seconds before they sleep. Raises Unreachable.
    """
    if size == 1:
        return Links({}, {})
    deadline = time.monotonic() + setup_timeout
    token = secrets.token_bytes(16)
    reception = Reception(
        group, rank, size, token=token, address=address, is_local=bool(host) and sys.platform == "linux",
        identity=identity, tell=tell,
    )  # fmt: skip
    links = Links({}, {})
    try:
        own = Published(address, reception.port, token.hex(), host, reception.local)
        publish(f"link/{rank}", json.dumps(own))
        for peer in ((rank + step) % size for step in range(1, size)):  # not all to the same one at first
            target = wait_for_rank_address(peer, lookup)
            if target.host != host:
                target = target._replace(local="")
            connection = connect_to_rank(Direction(group, rank, peer), target, deadline, identity, tell)
            links.outgoing[peer] = Outgoing(choose_stream(connection, timeout, spin), peer)
        for peer, connection in reception.wait_for_ranks(deadline).items():
            links.incoming[peer] = Incoming(choose_stream(connection, timeout, spin), peer)
    except BaseException:
        links.close()
        raise
    finally:
        reception.close()
    return links


def choose_stream(connection: socket.socket, timeout: float, spin: float) -> SocketStream:
    """Return how messages go over a connection."""
    is_local = connection.family == socket.AF_UNIX
    return MemoryStream(connection, timeout, spin) if is_local else SocketStream(connection, timeout)


def wait_for_rank_address(peer: int, lookup: Callable[[str], str | bytes]) -> Published:
    """Wait until a rank has published its address; return that. Raises Unreachable."""
    try:
        return Published(*json.loads(lookup(f"link/{peer}")))
    except (RuntimeError, OSError, ValueError, TypeError) as error:  # a store's errors are RuntimeErrors
        raise Unreachable(
            f"rank {peer} has not published its address: {summarize_error(error)}; see its log, or raise "
            "launch.setup_timeout"
        ) from None


def connect_to_rank(
    direction: Direction,
    target: Published,
    deadline: float,
    identity: Identity | None,
    tell: Callable[[str], object],
) -> socket.socket:
    """Connect to a rank until it has welcomed this one. Raises Unreachable."""
    start, told = time.monotonic(), ""
    where = f"rank {direction.target} at {target.address}:{target.port}"
    while True:
        limit = deadline
        try:
            return exchange_welcome(direction, target, deadline, identity)
        except Stranger as error:
            reason = str(error)
        except ssl.SSLError as error:
            reason = describe_refusal(error)
        except OSError as error:
            reason = (told or "it does not answer") if isinstance(error, TimeoutError) else summarize_error(error)
            if not isinstance(error, ConnectionResetError | BrokenPipeError):  # it had so many guests
                limit = min(deadline, start + network.UNREACHABLE_SECONDS)  # a port is published after it is open
        if time.monotonic() > limit:
            raise Unreachable(
                f"rank {direction.source} cannot connect to {where}: {reason}; see the log there, check the firewall, "
                "or raise launch.setup_timeout"
            )
        if reason != told:
            told = reason
            tell(f"rank {direction.source} waits for {where}: {reason}")
        time.sleep(RETRY)


def exchange_welcome(
    direction: Direction, target: Published, deadline: float, identity: Identity | None
) -> socket.socket:
    """Connect once. Raises OSError, ssl.SSLError, Stranger."""
    token = bytes.fromhex(target.token)
    left = max(RETRY, deadline - time.monotonic())
    connection = connect_to_local_rank(target.local, left) if target.local else None
    if connection is None:
        seconds = min(left, network.UNREACHABLE_SECONDS)
        connection = socket.create_connection((target.address, target.port), timeout=seconds)
    connection.settimeout(left)
    try:
        if identity and connection.family != socket.AF_UNIX:
            connection = TlsSocket(connection, identity.client)
            connection.do_handshake()
            check_peer(connection, identity)
        connection.sendall(make_hello(direction, token))
        answer = b""
        while len(answer) < ANSWER:
            data = connection.recv(ANSWER - len(answer))
            if not data:
                raise ConnectionResetError("it closed the connection without a welcome; its log says why")
            answer += data
        if not secrets.compare_digest(answer, make_answer(direction, token)):
            raise Stranger("another program answers there")
    except BaseException:
        connection.close()
        raise
    return connection


def connect_to_local_rank(name: str, seconds: float) -> socket.socket | None:
    """Connect to a rank of this host; None if none listens here or it is another user's.

    Another host may have the same name.
    """
    connection = socket.socket(socket.AF_UNIX)
    # with a time limit of Python's own it would not wait where others wait, too
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, pack_seconds(seconds))
    with contextlib.suppress(OSError):
        connection.connect("\0" + name)
        if read_peer_user_id(connection) == os.getuid():
            return connection
    connection.close()
    return None
