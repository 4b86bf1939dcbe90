"""What strangers send to the port of a rank, drawn at random, to test common/ranks/links/reception.py."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct

from common.ranks.links.connecting import RankAddress
from common.ranks.links.welcome import ConnectionId, make_hello

ODD: tuple[object, ...] = (
    None,
    True,
    -1,
    0,
    1,
    1e400,
    10**400,
    "",
    "run",
    "\ud800",
    [],
    {},
    [[]] * 9,
    {"a": 1},
    "x" * 3000,
)


def draw_input(draw: random.Random) -> bytes:
    """Bytes that no rank of the group sends: noise, half a welcome, a changed one, one of odd values."""
    right = make_hello(ConnectionId("run", 1, 0), b"guess")
    kind = draw.randrange(6)
    if kind == 0:
        return draw.randbytes(draw.choice((0, 1, 3, 4, 5, 100, 5000)))
    if kind == 1:
        return right[: draw.randrange(len(right))]
    if kind == 2:
        changed = bytearray(right)
        for _ in range(draw.randrange(1, 9)):
            changed[draw.randrange(len(right))] = draw.randrange(256)
        return bytes(changed)
    if kind == 3:
        text = draw.choice((b"[" * 4000, b"9" * 4096, b"[1,2", b'"', b"\xff\xfe[]", draw.randbytes(50)))
    elif kind == 4:
        text = json.dumps([draw.choice(ODD) for _ in range(draw.choice((0, 1, 3, 4, 4, 4, 4, 5)))]).encode()
    else:  # the first bytes of a TLS client, and whatever follows
        return b"\x16\x03\x01" + struct.pack("!H", draw.randrange(1 << 14)) + draw.randbytes(draw.randrange(400))
    return struct.pack("!I", len(text) if draw.random() < 0.9 else draw.randrange(1 << 32)) + text


def attack(found: RankAddress, inputs: int, seed: str, *, is_local: bool = False) -> None:
    """Send so many inputs to a rank, each on a connection of its own; leave some of them open, up to a hundred."""
    draw = random.Random(seed)
    held: list[socket.socket] = []
    for _ in range(inputs):
        stranger = socket.socket(socket.AF_UNIX if is_local else socket.AF_INET)
        with contextlib.suppress(ConnectionError, BrokenPipeError):  # refused while it spoke
            stranger.settimeout(None if is_local else 20)  # a Unix socket waits for its turn only without a limit
            stranger.connect("\0" + found.unix_socket_name if is_local else (found.address, found.port))
            stranger.settimeout(20)
            stranger.sendall(draw_input(draw))
        if draw.random() < 0.3:
            held.append(stranger)
            if len(held) > 100:
                held.pop(0).close()
        else:
            stranger.close()
    for stranger in held:
        stranger.close()
