"""The welcome of a connection: what both ranks prove before it counts. Imports no torch.

The rank that connects says who it is, and both prove that they know a random token that the other published through the
rendezvous. So no run is joined by accident or by a port scanner. It is no protection against whoever reads the network
or the rendezvous: that is what TLS is for, under which the same welcome follows the handshake. (Under TLS 1.3 the
handshake of a client succeeds before the server has judged its certificate: only the answer says that it did.)
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from typing import NamedTuple

LENGTH = struct.Struct("!I")  # of a hello, before it
LONGEST = 4096  # bytes of a hello
ANSWER = hashlib.sha256().digest_size  # bytes of an answer


class Stranger(Exception):
    """Somebody who does not belong here; the text completes `a connection from ADDRESS, which ...`."""


class Direction(NamedTuple):
    """Subject of a welcome: a connection of a run, an attempt and a group, from one rank to another."""

    group: str
    """Run, attempt and process group."""
    source: int
    target: int


def make_hello(direction: Direction, token: bytes) -> bytes:
    """Return what the source sends first; `token` is that of the target."""
    text = json.dumps([*direction, compute_proof("hello", direction, token).hex()]).encode()
    return LENGTH.pack(len(text)) + text


def make_answer(direction: Direction, token: bytes) -> bytes:
    """Return what the target answers."""
    return compute_proof("welcome", direction, token)


def compute_proof(word: str, direction: Direction, token: bytes) -> bytes:
    """Return what only who knows the token can know."""
    return hmac.digest(token, json.dumps([word, *direction]).encode(), "sha256")


def parse_length(head: bytes) -> int:
    """Return the length of a hello. Raises Stranger."""
    (length,) = LENGTH.unpack(head)
    if not 0 < length <= LONGEST:
        raise Stranger("sent what is no welcome")
    return int(length)


def parse_hello(body: bytes, group: str, target: int, token: bytes) -> int:
    """Return the rank that sent a hello. Raises Stranger if it does not belong to this group, or cannot prove it."""
    try:
        theirs, source, wanted, proof = json.loads(body)
    except (ValueError, TypeError, RecursionError):
        raise Stranger("sent what is no welcome") from None
    if not (isinstance(theirs, str) and isinstance(proof, str) and type(source) is int and type(wanted) is int):
        raise Stranger("sent what is no welcome")
    if theirs != group:
        raise Stranger(f"belongs to {theirs[:80]!a}, not to {group}")
    if wanted != target:
        raise Stranger(f"looks for rank {wanted}")
    expected = compute_proof("hello", Direction(group, source, target), token).hex()
    if not hmac.compare_digest(proof.encode(errors="replace"), expected.encode()):
        raise Stranger("does not know the token that this rank published")
    return source
