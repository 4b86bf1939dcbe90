"""Collectives of plain values, which travel as JSON: what another rank sends is read, and nothing in it is executed.

torch's object collectives unpickle what arrives, and a pickle may execute anything (Python's page on `pickle`).
Values are text, numbers, True, False, None, lists, and dicts whose keys are text: these arrive equal, NaN as NaN.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PACKET = 1024  # bytes of the first message: most values need no second one
HEADER = 8  # bytes at its start: how many bytes of a value follow, little-endian
LEAVES = frozenset((str, int, float, bool, type(None)))
LONGEST = 1 << 30  # bytes of a value; more is refused before memory is taken for it

Collect = Callable[[Tensor], Sequence[Tensor]]  # a collective: this rank's tensor to those of all senders


def all_gather_json(value: Any, device: torch.device, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the plain value of each rank of the group, in its order. All its ranks call it.

    `device` is one that the group's backend can send from. Raises TypeError, before anything is sent, for a value that
    is not plain, and ValueError naming the rank that sent what is no JSON.
    """
    found = all_gather_bytes(encode_value(value), device, group)
    return [decode_value(text, rank) for text, rank in zip(found, dist.get_process_group_ranks(group), strict=True)]


def broadcast_json(value: Any, source: int, device: torch.device, group: dist.ProcessGroup | None = None) -> Any:
    """Return the plain value of one rank of the group on all of them; `source` is its rank in the run.

    All ranks of the group call it. Device and errors as for `all_gather_json`.
    """
    own = encode_value(value) if dist.get_rank() == source else b""
    return decode_value(broadcast_bytes(own, source, device, group), source)


def encode_value(value: Any) -> bytes:
    """Return a plain value as JSON. Raises TypeError for any other."""
    check_plain(value, "the value")
    return json.dumps(value).encode()


def decode_value(text: bytes, rank: int) -> Any:
    """Return the value that a rank has sent. Raises ValueError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(
            f"rank {rank} sent {len(text)} bytes that are no JSON; it executes other source than this rank, or is none "
            "of this run"
        ) from None


def check_plain(value: Any, name: str) -> None:
    """Raise TypeError, which names the part, where JSON would not give back an equal value."""
    if isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{name} has the key {key!r}; between ranks keys are text")
            if type(part) not in LEAVES:  # saves most of the calls
                check_plain(part, f"{name}[{key!r}]")
    elif isinstance(value, list):
        for position, part in enumerate(value):
            if type(part) not in LEAVES:
                check_plain(part, f"{name}[{position}]")
    elif value is not None and not isinstance(value, (str, int, float)):
        raise TypeError(
            f"{name} is of type {type(value).__name__}; between ranks travel text, numbers, True, False, None, lists, "
            "and dicts with keys of text"
        )


# ---- bytes


def all_gather_bytes(own: bytes, device: torch.device, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return the bytes of each rank of the group, of any lengths. All its ranks call it. Raises ValueError."""
    ranks = dist.get_process_group_ranks(group)

    def collect(mine: Tensor) -> list[Tensor]:
        found = list(mine.new_empty(len(ranks), len(mine)))
        dist.all_gather(found, mine, group)
        return found

    return exchange_bytes(own, device, ranks, collect)


def broadcast_bytes(own: bytes, source: int, device: torch.device, group: dist.ProcessGroup | None = None) -> bytes:
    """Return the bytes of one rank of the group on all of them. All its ranks call it. Raises ValueError."""

    def collect(mine: Tensor) -> list[Tensor]:
        # no broadcast: gloo wakes no rank that waits for the rest of one when the connection ends
        dist.all_reduce(mine, group=group)  # the others give zeros
        return [mine]

    return exchange_bytes(own if dist.get_rank() == source else b"", device, [source], collect)[0]


def exchange_bytes(own: bytes, device: torch.device, senders: Sequence[int], collect: Collect) -> list[bytes]:
    """Return the bytes of all senders by one collective, or by two where a sender has more than fit into a packet.

    Raises ValueError, on all ranks, where a sender announces more than LONGEST.
    """

    def send(part: bytes, size: int) -> list[bytes]:
        padded = torch.frombuffer(bytearray(part.ljust(size, b"\0")), dtype=torch.uint8)
        return [tensor.cpu().numpy().tobytes() for tensor in collect(padded.to(device))]

    own = len(own).to_bytes(HEADER, "little") + own
    found = send(own[:PACKET], PACKET)
    lengths = [int.from_bytes(packet[:HEADER], "little") for packet in found]
    for rank, length in zip(senders, lengths, strict=True):
        if length > LONGEST:
            raise ValueError(f"rank {rank} announces a value of {length} bytes; at most {LONGEST} are read")
    rest = HEADER + max(lengths) - PACKET
    if rest > 0:
        found = [first + more for first, more in zip(found, send(own[PACKET:], rest), strict=True)]
    return [packet[HEADER : HEADER + length] for packet, length in zip(found, lengths, strict=True)]
