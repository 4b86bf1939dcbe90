"""Copying of the training state from one rank to other ranks over the network, without using the disk."""

from __future__ import annotations

import io

import torch

from common.checkpoint.loading import LoadedCheckpoint
from common.checkpoint.state_dicts import convert_to_plain_values
from common.checkpoint.train_state import TrainState
from common.ranks import objects
from common.ranks.rendezvous import World

PIECE_BYTES = 256 << 20  # a training state may be larger than the largest value that ranks can exchange


def broadcast_state(state: TrainState, source: int, world: World, step: int, *, loads: bool) -> None:
    """Send the training state that rank `source` has after step `step` to all ranks.

    All ranks must call this function. A rank that passes `loads=True` loads the state after the state has been received
    completely. The state contains only tensors and plain Python values, so loading the state cannot execute code.
    """
    buffer = io.BytesIO()
    if world.rank == source:
        parts = vars(state.collect_local_state()).items()
        torch.save({name: convert_to_plain_values(part, name) for name, part in parts}, buffer)
    received = broadcast_in_pieces(buffer.getvalue(), source, world)
    if not loads:
        return
    content = torch.load(received, weights_only=True, map_location="cpu")
    state.load_peer_state(
        LoadedCheckpoint(
            step,
            attempt=0,
            processes=world.size,
            model=content["model"],
            optimizer=content["optimizer"],
            common=content["common"],
            local=content["local"],
        )
    )


def broadcast_in_pieces(payload: bytes, source: int, world: World) -> io.BytesIO:
    """Return the bytes of rank `source` on all other ranks, sent in pieces of at most PIECE_BYTES.

    The file that rank `source` gets is empty. All ranks must call this function.
    """
    received = io.BytesIO()
    length = objects.broadcast_json(len(payload), source, world.device)
    for start in range(0, length, PIECE_BYTES):
        piece = objects.broadcast_bytes(payload[start : start + PIECE_BYTES], source, world.device)
        if world.rank != source:
            received.write(piece)
    received.seek(0)
    return received
