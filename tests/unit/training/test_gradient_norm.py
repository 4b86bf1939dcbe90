"""Norm of the gradients: clipping, and which settings log the norm. Parity tests compare the norm with one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from common.data.prepare import prepare_digits
from common.models import networks
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.folder import RunFolder
from common.training.run import Run
from configs.mnist_pipeline import Config
from configs.shared import Data, Log


def flatten_gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def train(run: Run, max_norm: float) -> tuple[list[float], list[float]]:
    """Train two steps, and return the norms of the gradients before and after clipping."""
    model = networks.SimpleNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.register(model, optimizer, run.batches())
    before: list[float] = []
    after: list[float] = []
    for step in run.steps(dict):
        optimizer.zero_grad()
        F.cross_entropy(model(step.x), step.y).backward()
        before.append(flatten_gradients(model).norm().item())
        step.clip_gradients(model.parameters(), max_norm)
        after.append(flatten_gradients(model).norm().item())
        optimizer.step()
    return before, after


LOGGED = {("auto", 0.0): False, ("auto", 0.5): True, ("true", 0.0): True, ("true", 0.5): True, ("false", 0.5): False}


@pytest.mark.parametrize("setting, max_norm", LOGGED)
def test_the_norm_before_clipping_is_logged(
    setting: Any, max_norm: float, attempt_folder: RunFolder, cache: Path, world: World
) -> None:
    cfg = dataclasses.replace(
        Config(batch=16, steps=2, data=Data(name="digits")), log=Log(gradient_norm=setting, progress="none")
    )
    before, after = train(Run(cfg, attempt_folder, Ranks(world), prepare_digits(cache)), max_norm)
    assert min(before) > 0.5
    assert after == pytest.approx([max_norm] * 2 if max_norm else before, rel=1e-3)
    rows = list(attempt_folder.read_attempt_rows())
    assert len(rows) == 2
    if LOGGED[setting, max_norm]:
        assert [row["gradient_norm"] for row in rows] == pytest.approx(before, rel=1e-5)
    else:
        assert not any("gradient_norm" in row for row in rows)
