"""Optimizers and the learning rate as a function of the step (so there is no scheduler state to lose)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from configs.shared import Optim


def make(parameters: Iterable[nn.Parameter], settings: Optim) -> torch.optim.Optimizer:
    """The optimizer that the settings name, in its fused form: one kernel for all parameters."""
    if settings.name == "adam":
        return torch.optim.Adam(parameters, lr=settings.lr, weight_decay=settings.weight_decay, fused=True)
    return torch.optim.SGD(
        parameters,
        lr=settings.lr,
        momentum=settings.momentum,
        nesterov=settings.momentum > 0,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def rate(settings: Optim, step: int, total: int) -> float:
    """The learning rate of a step, counted from 0, in a run of `total` steps."""
    return settings.lr * (1 - step / total) if settings.decay == "linear" else settings.lr


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
