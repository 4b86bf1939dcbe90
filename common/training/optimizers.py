"""Optimizers and the learning rate as a function of the step (so there is no scheduler state to lose)."""

from __future__ import annotations

import inspect
import math
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


class AdamW(_Eager, torch.optim.AdamW):
    """torch.optim.AdamW for code that is not compiled."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


def build_optimizer(parameters: Iterable[nn.Parameter], cfg: Optim, *, scaled: bool = False) -> Optimizer:
    """Build the optimizer that the configuration names, in its fused form: one kernel for all parameters.

    `scaled` says that a GradScaler may leave steps out.
    """
    if cfg.name != "sgd":
        kind = AdamW if cfg.name == "adamw" else Adam
        return kind(parameters, lr=cfg.lr, weight_decay=cfg.weight_decay, fused=True)
    parameters = list(parameters)
    optimizer = SGD(
        parameters,
        lr=cfg.lr,
        momentum=cfg.momentum,
        nesterov=cfg.nesterov and cfg.momentum > 0,
        weight_decay=cfg.weight_decay,
        fused=all(type(parameter) is nn.Parameter for parameter in parameters),  # not written for sharded ones
    )
    if scaled and cfg.momentum:
        # where the very first step is left out, the fused kernel leaves the momentum as memory happened to be;
        # 0.9 * 0 + gradient is what a first step makes of it, to the bit
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def learning_rate(cfg: Optim, step: int, total: int, batch: int = 0) -> float:
    """Return the learning rate of a step, counted from 0, in a run of `total` steps with `batch` samples each.

    With cfg.base_batch it grows with the batch (linear scaling rule: Goyal et al. 2017, arXiv 1706.02677).
    """
    peak = cfg.lr * batch / cfg.base_batch if cfg.base_batch and batch else cfg.lr
    if step < cfg.warmup:
        return peak * (step + 1) / cfg.warmup
    done = (step - cfg.warmup) / max(1, total - cfg.warmup)
    if cfg.decay == "cosine":
        return peak * (1 + math.cos(math.pi * done)) / 2
    return peak * (1 - done) if cfg.decay == "linear" else peak


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr
