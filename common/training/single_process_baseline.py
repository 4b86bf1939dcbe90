"""One process's training as it would be without the others, to measure against."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.data.loader import Images, Loader
from common.measure.timing import time_calls
from common.training import optimizers
from configs.shared import Experiment


def trainer(
    cfg: Experiment,
    model: Callable[[Tensor], Tensor],
    parameters: nn.Module,
    train: Images,
    device: torch.device,
    share: tuple[int, int] = (0, 1),
) -> Callable[[], Tensor]:
    """A function that takes one step with the next batch, or with a share of it, and gives the loss."""
    optimizer = optimizers.make(parameters.train().parameters(), cfg.optim)
    loader = Loader.from_config(train, cfg, device, shard=share)
    batches = (batch for _ in itertools.count() for batch in loader)

    def step() -> Tensor:
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def seconds(step: Callable[[], Tensor], device: torch.device, count: int, patience: float = math.inf) -> float:
    """Return the mean seconds of `count` steps after two to warm up, or of fewer if these take `patience` seconds."""
    return mean(time_calls(step, device, count, warm_up=2, budget=patience))
