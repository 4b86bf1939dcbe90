"""Collectives for JSON values. Received data is parsed and never executed.

In contrast, torch's object collectives unpickle received bytes, and a pickle can execute arbitrary code (see Python's
documentation of `pickle`). Values can be strings, numbers, True, False, None, lists, and dicts with string keys. The
received values are equal to the sent values, except that NaN, which equals no value, is received as NaN.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

PACKET_BYTES = 1024  # size of the first message, into which most values fit
HEADER_BYTES = 8  # size of the header, which contains the length of the value in bytes (little-endian)
SCALAR_TYPES = frozenset((str, int, float, bool, type(None)))
MAX_VALUE_BYTES = 1 << 30  # larger values are rejected before memory is allocated for them

Collective = Callable[[Tensor], Sequence[Tensor]]  # takes this rank's tensor and returns the tensors of all senders


def all_gather_json(value: Any, device: torch.device, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the JSON value of each rank of the group, ordered by rank.

    All ranks of the group must call this function. The backend of the group must be able to send from `device`. Raises
    TypeError before sending if the value of this rank is not a JSON value. Raises ValueError if a rank sends bytes that
    are not valid JSON. The error message names this rank.
    """
    texts = all_gather_bytes(encode_value(value), device, group)
    ranks = dist.get_process_group_ranks(group)
    return [decode_value(text, rank) for text, rank in zip(texts, ranks, strict=True)]


def broadcast_json(value: Any, source: int, device: torch.device, group: dist.ProcessGroup | None = None) -> Any:
    """Return the JSON value of rank `source` on all ranks of the group.

    `source` is a global rank, not a rank within the group. All ranks of the group must call this function. See
    `all_gather_json` for the requirements on `device` and for the errors.
    """
    text = encode_value(value) if dist.get_rank() == source else b""
    return decode_value(broadcast_bytes(text, source, device, group), source)


def encode_value(value: Any) -> bytes:
    """Encode a value as JSON. Raises TypeError if decoding would not restore an equal value."""
    check_json_value(value, "the value")
    return json.dumps(value).encode()


def decode_value(text: bytes, rank: int) -> Any:
    """Decode a JSON value received from a rank. Raises ValueError if the bytes are not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(
            f"rank {rank} sent {len(text)} bytes that are not valid JSON; check that this rank belongs to the same run "
            "and uses the same source code"
        ) from None


def check_json_value(value: Any, name: str) -> None:
    """Raise TypeError if JSON cannot restore an equal value. The error message names the invalid part."""
    if isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{name} has the key {key!r}; keys sent between ranks must be strings")
            if type(part) not in SCALAR_TYPES:  # avoids most of the recursive calls
                check_json_value(part, f"{name}[{key!r}]")
    elif isinstance(value, list):
        for position, part in enumerate(value):
            if type(part) not in SCALAR_TYPES:
                check_json_value(part, f"{name}[{position}]")
    elif value is not None and not isinstance(value, (str, int, float)):
        raise TypeError(
            f"{name} is of type {type(value).__name__}; ranks can exchange strings, numbers, True, False, None, lists, "
            "and dicts with string keys"
        )


# ---- bytes


def all_gather_bytes(payload: bytes, device: torch.device, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return the bytes of each rank of the group, ordered by rank.

    The bytes of the ranks may have different lengths. All ranks of the group must call this function. Raises ValueError
    if a rank sends more than MAX_VALUE_BYTES.
    """
    ranks = dist.get_process_group_ranks(group)

    def gather(packet: Tensor) -> list[Tensor]:
        packets = list(packet.new_empty(len(ranks), len(packet)))
        dist.all_gather(packets, packet, group)
        return packets

    return exchange_bytes(payload, device, ranks, gather)


def broadcast_bytes(payload: bytes, source: int, device: torch.device, group: dist.ProcessGroup | None = None) -> bytes:
    """Return the bytes of rank `source` on all ranks of the group.

    All ranks of the group must call this function. Raises ValueError if rank `source` sends more than MAX_VALUE_BYTES.
    """

    def broadcast(packet: Tensor) -> list[Tensor]:
        # An all-reduce replaces dist.broadcast: if a connection ends in the middle of a broadcast, gloo does not wake a
        # rank that waits for the remaining bytes.
        dist.all_reduce(packet, group=group)  # the other ranks add zeros
        return [packet]

    if dist.get_rank() != source:
        payload = b""
    return exchange_bytes(payload, device, [source], broadcast)[0]


def exchange_bytes(payload: bytes, device: torch.device, senders: Sequence[int], collective: Collective) -> list[bytes]:
    """Return the bytes of all senders.

    The exchange takes one collective, or two collectives if a value does not fit into the first message. Raises
    ValueError on all ranks if a sender announces more than MAX_VALUE_BYTES.
    """

    def exchange_packet(part: bytes, size: int) -> list[bytes]:
        padded = bytearray(part.ljust(size, b"\0"))
        packet = torch.frombuffer(padded, dtype=torch.uint8).to(device)
        return [tensor.cpu().numpy().tobytes() for tensor in collective(packet)]

    message = len(payload).to_bytes(HEADER_BYTES, "little") + payload
    received = exchange_packet(message[:PACKET_BYTES], PACKET_BYTES)
    lengths = [int.from_bytes(packet[:HEADER_BYTES], "little") for packet in received]
    for rank, length in zip(senders, lengths, strict=True):
        if length > MAX_VALUE_BYTES:
            raise ValueError(f"rank {rank} announces a value of {length} bytes; the limit is {MAX_VALUE_BYTES}")
    remaining = HEADER_BYTES + max(lengths) - PACKET_BYTES
    if remaining > 0:
        remainders = exchange_packet(message[PACKET_BYTES:], remaining)
        received = [packet + remainder for packet, remainder in zip(received, remainders, strict=True)]
    return [packet[HEADER_BYTES : HEADER_BYTES + length] for packet, length in zip(received, lengths, strict=True)]
