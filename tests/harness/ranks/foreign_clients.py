"""Clients that send random input to the port of a rank, for tests of common/ranks/links/reception.py."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct

from common.ranks.links.connecting import RankAddress
from common.ranks.links.welcome import ConnectionId, make_hello

UNEXPECTED_VALUES: tuple[object, ...] = (
    *(None, True, -1, 0, 1, 1e400, 10**400),
    *("", "run", "\ud800", "x" * 3000),
    *([], {}, [[]] * 9, {"a": 1}),
)


def draw_input(generator: random.Random) -> bytes:
    """Draw bytes that no rank sends: noise, a truncated or changed handshake, or one with unexpected values."""
    valid = make_hello(ConnectionId("run", 1, 0), b"guess")
    kind = generator.randrange(6)
    if kind == 0:
        return generator.randbytes(generator.choice((0, 1, 3, 4, 5, 100, 5000)))
    if kind == 1:
        return valid[: generator.randrange(len(valid))]
    if kind == 2:
        changed = bytearray(valid)
        for _ in range(generator.randrange(1, 9)):
            changed[generator.randrange(len(valid))] = generator.randrange(256)
        return bytes(changed)
    if kind == 3:
        texts = (b"[" * 4000, b"9" * 4096, b"[1,2", b'"', b"\xff\xfe[]", generator.randbytes(50))
        text = generator.choice(texts)
    elif kind == 4:
        length = generator.choice((0, 1, 3, 4, 4, 4, 4, 5))
        values = [generator.choice(UNEXPECTED_VALUES) for _ in range(length)]
        text = json.dumps(values).encode()
    else:  # the first bytes of a TLS client, followed by noise
        header = b"\x16\x03\x01" + struct.pack("!H", generator.randrange(1 << 14))
        return header + generator.randbytes(generator.randrange(400))
    announced_length = len(text) if generator.random() < 0.9 else generator.randrange(1 << 32)
    return struct.pack("!I", announced_length) + text


def send_random_inputs(target: RankAddress, count: int, seed: str, *, is_local: bool = False) -> None:
    """Send `count` inputs to a rank, each on a new connection. Up to a hundred connections stay open."""
    generator = random.Random(seed)
    open_clients: list[socket.socket] = []
    address = "\0" + target.unix_socket_name if is_local else (target.address, target.port)
    for _ in range(count):
        client = socket.socket(socket.AF_UNIX if is_local else socket.AF_INET)
        with contextlib.suppress(ConnectionError, BrokenPipeError):  # the rank may close the connection early
            client.settimeout(None if is_local else 20)  # a Unix socket waits for a full backlog only without a timeout
            client.connect(address)
            client.settimeout(20)
            client.sendall(draw_input(generator))
        if generator.random() < 0.3:
            open_clients.append(client)
            if len(open_clients) > 100:
                open_clients.pop(0).close()
        else:
            client.close()
    for client in open_clients:
        client.close()
