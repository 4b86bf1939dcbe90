"""Copy of one rank's state to other ranks, from memory to memory, in the form of a checkpoint."""

from __future__ import annotations

import io

import torch

from common.checkpoint.checkpointer import LoadedCheckpoint
from common.checkpoint.state_dicts import to_plain
from common.checkpoint.train_state import TrainState
from common.distributed import objects
from common.distributed.rendezvous import World


def copy_state(state: TrainState, source: int, world: World, step: int, *, loads: bool) -> None:
    """Send the state of rank `source` after `step`; ranks with `loads` load it. All ranks call it.

    It is loaded after all of it has arrived. It contains tensors and primitives only, so nothing in it is executed.
    """
    buffer = io.BytesIO()
    if world.rank == source:
        parts = vars(state.collect_local_state()).items()
        torch.save({name: to_plain(part, name) for name, part in parts}, buffer)
    received = objects.broadcast_bytes(buffer.getvalue(), source, world.device)
    if not loads:
        return
    content = torch.load(io.BytesIO(received), weights_only=True, map_location="cpu")
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
