"""Optimizers and the learning rate as a function of the step (so there is no scheduler state to lose)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from configs.shared import Optim


class _Eager(Optimizer):
    """Optimizer methods without the wrappers that import the compiler.

    At its first call every optimizer of torch imports torch._dynamo, a second of a short run's start, though
    nothing is compiled. The functions inside the wrappers are the same arithmetic.
    """

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)


class SGD(_Eager, torch.optim.SGD):
    """torch.optim.SGD for code that is not compiled."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


class Adam(_Eager, torch.optim.Adam):
    """torch.optim.Adam for code that is not compiled."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


def make(parameters: Iterable[nn.Parameter], settings: Optim) -> Optimizer:
    """The optimizer that the settings name, in its fused form: one kernel for all parameters."""
    if settings.name == "adam":
        return Adam(parameters, lr=settings.lr, weight_decay=settings.weight_decay, fused=True)
    return SGD(
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


def set_rate(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
