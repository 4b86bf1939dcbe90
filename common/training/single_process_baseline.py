"""One process's training as it would be without the others, to measure against."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.data.loader import Images, Loader
from common.measure.step_timing import wait_for
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
    loader = Loader.of(train, cfg, device, share=share)
    batches = (batch for _ in itertools.count() for batch in loader)

    def step() -> Tensor:
        x, y = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def seconds(step: Callable[[], Tensor], count: int, patience: float = math.inf) -> float:
    """The mean of `count` steps, two before them left out, or of fewer if they take longer than `patience` seconds."""
    began = time.perf_counter()
    marks: list[float] = []
    while len(marks) < count + 2 and (len(marks) < 3 or marks[-1] - began < patience):
        wait_for(step())
        marks.append(time.perf_counter())
    return (marks[-1] - marks[1]) / (len(marks) - 2)
