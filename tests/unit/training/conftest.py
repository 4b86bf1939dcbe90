"""Runs of a single rank, and their training state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.checkpoint.train_state import TrainState
from common.data.prepare import PreparedDataset, prepare_digits
from common.models import networks
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.training.run import Run
from configs.mnist_pipeline import Config
from configs.shared import Data


@pytest.fixture
def attempt_folder(tmp_path: Path) -> RunFolder:
    """The folder of a run, with its first attempt."""
    return RunFolder.create(tmp_path, "mnist_pipeline", "").claim_attempt()


@pytest.fixture
def run(attempt_folder: RunFolder, tmp_path: Path) -> Run:
    """A run of two steps that has not registered a model."""
    world = World(hosts=("here",), device=torch.device("cpu"), backend="gloo", threads=1)
    cfg = Config(batch=16, steps=2, data=Data(name="digits"))
    return Run(cfg, attempt_folder, Ranks(world), PreparedDataset("digits", tmp_path, {}))


@pytest.fixture
def state(run: Run, cache: Path, world: World) -> TrainState:
    """The state of a run that has registered a model."""
    run.prepared = prepare_digits(cache)
    model = networks.SimpleNN()
    run.register(model, torch.optim.SGD(model.parameters()), run.batches())
    assert run.state is not None
    return run.state
