"""Handshake in which two ranks prove that they belong to the same group.

The connecting rank sends its identity. Both ranks then prove that they know a random token that the accepting rank has
published through the rendezvous. Therefore, neither a misdirected rank nor a port scanner can join a run. This
handshake does not protect against an attacker who can read the network traffic or the rendezvous, but TLS does.

If TLS is used, this handshake takes place after the TLS handshake. In TLS 1.3, the client completes its TLS handshake
before the server has verified the client's certificate. Therefore, only the server's answer in this handshake confirms
that the server has accepted the certificate. This module does not import torch.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from typing import NamedTuple

HELLO_HEADER = struct.Struct("!I")  # length in bytes of the hello message that follows
MAX_HELLO_BYTES = 4096
ANSWER_BYTES = hashlib.sha256().digest_size
INVALID_HELLO = "sent an invalid handshake"


class UntrustedPeer(Exception):
    """Raised if the peer is not a rank of this group.

    The error message completes a sentence that starts with `the peer`.
    """


class ConnectionId(NamedTuple):
    """Identity of a connection: the group of ranks, and the two ranks that are connected."""

    group: str
    """Identifier of the run, the attempt and the process group."""
    source: int
    target: int


def make_hello(direction: ConnectionId, token: bytes) -> bytes:
    """Return the hello message, with which the connecting rank (the source) starts the handshake.

    `token` is the token that the accepting rank (the target) has published.
    """
    proof = compute_proof("hello", direction, token).hex()
    text = json.dumps([*direction, proof]).encode()
    return HELLO_HEADER.pack(len(text)) + text


def make_hello_answer(direction: ConnectionId, token: bytes) -> bytes:
    """Return the message with which the accepting rank (the target) answers a hello message."""
    return compute_proof("welcome", direction, token)


def compute_proof(purpose: str, direction: ConnectionId, token: bytes) -> bytes:
    """Return an HMAC that proves knowledge of the token."""
    message = json.dumps([purpose, *direction]).encode()
    return hmac.digest(token, message, "sha256")


def parse_hello_length(header: bytes) -> int:
    """Return the length of a hello message in bytes. Raises UntrustedPeer if the length is invalid."""
    (length,) = HELLO_HEADER.unpack(header)
    if not 0 < length <= MAX_HELLO_BYTES:
        raise UntrustedPeer(INVALID_HELLO)
    return int(length)


def parse_hello(body: bytes, group: str, target: int, token: bytes) -> int:
    """Return the rank that sent a hello message.

    Raises UntrustedPeer if the message is for another group or target, or if its proof is wrong.
    """
    try:
        peer_group, source, peer_target, proof = json.loads(body)
    except (ValueError, TypeError, RecursionError):
        raise UntrustedPeer(INVALID_HELLO) from None
    are_strings = isinstance(peer_group, str) and isinstance(proof, str)
    if not (are_strings and type(source) is int and type(peer_target) is int):
        raise UntrustedPeer(INVALID_HELLO)

    if peer_group != group:
        raise UntrustedPeer(f"belongs to {peer_group[:80]!a}, not to {group}")
    if peer_target != target:
        raise UntrustedPeer(f"expected rank {peer_target}, but this is rank {target}")
    expected = compute_proof("hello", ConnectionId(group, source, target), token).hex()
    if not hmac.compare_digest(proof.encode(errors="replace"), expected.encode()):
        raise UntrustedPeer("does not know the token that this rank published")
    return source
