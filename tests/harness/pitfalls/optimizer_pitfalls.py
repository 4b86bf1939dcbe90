"""Mistakes with an optimizer whose state is divided among two ranks."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from common.checkpoint.checkpointer import Checkpointer, CheckpointState
from common.checkpoint.train_state import TrainState
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.techniques.sharded_optimizer.optimizer_shards import OptimizerShards
from common.training.measurement_points import MeasurementPoints
from common.training.optimizers import build_optimizer
from configs.shared import Checkpoint, Optim
from tests.harness.pitfalls.outcomes import collect_from_ranks

SAVED_STEP = 3
LAST_STEP = 5


def divided_state_saved_by_rank_0() -> Any:
    """The mistake: only rank 0 saves its optimizer state. The checkpoint with the states of all ranks follows."""
    folder = Path(tempfile.mkdtemp())

    def compare(world: World) -> dict[str, Any]:
        model, optimizer = build(world, seed=0)
        take_steps(model, optimizer, 0, SAVED_STEP)
        state = copy.deepcopy(make_state(world, model, optimizer).collect_state())
        of_rank_0 = dataclasses.replace(state, optimizer=state.optimizer if world.is_main else {})
        take_steps(model, optimizer, SAVED_STEP, LAST_STEP)
        differences = {}
        for name, saved in (("rank 0", of_rank_0), ("all ranks", state)):
            resumed = resume(world, folder / name, saved)
            pairs = zip(model.parameters(), resumed.parameters(), strict=True)
            gaps = [(parameter - other).abs().max() for parameter, other in pairs]
            differences[name] = [gap.item() for gap in gaps]
        return differences

    return collect_from_ranks(2, compare)


def build(world: World, seed: int) -> tuple[nn.Module, Optimizer]:
    """Build a model and an optimizer whose state is divided. Each rank updates one of the two layers."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizer = build_optimizer(model.parameters(), Optim(name="adam", lr=0.1))
    assert dist.group.WORLD is not None
    OptimizerShards(optimizer, dist.group.WORLD).start()
    return model, optimizer


def take_steps(model: nn.Module, optimizer: Optimizer, start: int, end: int) -> None:
    for step in range(start, end):
        torch.manual_seed(step)
        optimizer.zero_grad()
        outputs = model(torch.randn(3, 4))
        outputs.square().mean().backward()
        optimizer.step()


def make_state(world: World, model: nn.Module, optimizer: Optimizer) -> TrainState:
    return TrainState([model], optimizer, MeasurementPoints([0]), peers=Ranks(world))


def resume(world: World, folder: Path, saved: CheckpointState) -> nn.Module:
    """Save a checkpoint, load it into a new model, train until the last step, and return the model."""
    if world.is_main:
        RunFolder(folder).path.mkdir()
        RunFolder(folder).claim_attempt().record_parent_attempt(None, 0)
    dist.barrier()
    checkpointer = Checkpointer(RunFolder(folder, 1), Ranks(world), Checkpoint(), lambda message: None)
    assert checkpointer.save(SAVED_STEP, saved)
    loaded = checkpointer.load()
    assert loaded is not None
    model, optimizer = build(world, seed=1)
    make_state(world, model, optimizer).load(loaded)
    take_steps(model, optimizer, SAVED_STEP, LAST_STEP)
    return model
