"""Optimizers and the learning rate as a function of the step (so there is no scheduler state to lose)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from configs.shared import Optim

T = TypeVar("T", bound=Optimizer)


def remove_compiler_hooks(kind: type[T]) -> type[T]:
    """Return an optimizer class of torch whose methods do not import the compiler.

    At its first call every optimizer of torch imports torch._dynamo, a second of a short run's start, though
    nothing is compiled. The functions inside the wrappers are the same arithmetic.
    """
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict", "step")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    return type(kind.__name__, (kind,), methods | {"step": torch.no_grad()(methods["step"])})


SGD = remove_compiler_hooks(torch.optim.SGD)
Adam = remove_compiler_hooks(torch.optim.Adam)
AdamW = remove_compiler_hooks(torch.optim.AdamW)


def build_optimizer(parameters: Iterable[nn.Parameter], cfg: Optim, *, scaled: bool = False) -> Optimizer:
    """Build the optimizer that the config names, in its fused form: one kernel for all parameters.

    With `scaled` a GradScaler may leave steps out. Adam is of Kingma and Ba 2014 (arXiv 1412.6980), AdamW of Loshchilov
    and Hutter 2017 (arXiv 1711.05101).
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


def compute_learning_rate(cfg: Optim, step: int, total: int, batch: int) -> float:
    """Return the learning rate of a step, counted from 0, in a run of `total` steps with `batch` samples each.

    It is proportional to the batch where optim.base_batch is set, and rises during the warm-up (Goyal et al. 2017,
    arXiv 1706.02677); the cosine decay is that of Loshchilov and Hutter 2016 (arXiv 1608.03983), without restarts.
    """
    peak = cfg.lr * batch / cfg.base_batch if cfg.base_batch else cfg.lr
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
