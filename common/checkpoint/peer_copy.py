"""Copy of one rank's state to others, from memory to memory, as a checkpoint would bring it."""

from __future__ import annotations

import io
from typing import Any

import torch

from common.checkpoint.checkpointer import LoadedCheckpoint
from common.checkpoint.state_dicts import to_plain
from common.checkpoint.train_state import TrainState
from common.distributed import objects
from common.distributed.rendezvous import World


def copy_state(state: TrainState, source: int, world: World, step: int, *, loads: bool) -> None:
    """Send the state of the rank `source`, after `step`; ranks that are to load it do. All ranks call it.

    What arrives is loaded once all of it is there. It holds tensors and primitives: nothing in it is executed.
    """
    own = io.BytesIO()
    if world.rank == source:
        parts = vars(state.collect_own_state())
        torch.save({name: to_plain(value, name) for name, value in parts.items()}, own)
    found = objects.broadcast_bytes(own.getvalue(), source, world.device)
    if loads:
        content: dict[str, Any] = torch.load(io.BytesIO(found), weights_only=True, map_location="cpu")
        state.load_copy(LoadedCheckpoint(step, 0, world.size, **content))
