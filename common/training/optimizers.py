"""Optimizers, and the learning rate as a function of the step, so that no scheduler state has to be saved."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from common.config.custom_function import convert_errors_of_user_file, load_function
from common.training import custom_optimizer, layerwise
from configs.shared import Optim

T = TypeVar("T", bound=Optimizer)


def remove_compiler_hooks(kind: type[T]) -> type[T]:
    """Return an optimizer class of torch whose methods do not import the compiler.

    At its first call, every optimizer of torch imports torch._dynamo although nothing is compiled. That takes a second.
    The unwrapped functions compute the same values.
    """
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict", "step")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    methods["step"] = torch.no_grad()(methods["step"])
    return type(kind.__name__, (kind,), methods)


SGD = remove_compiler_hooks(torch.optim.SGD)
Adam = remove_compiler_hooks(torch.optim.Adam)
AdamW = remove_compiler_hooks(torch.optim.AdamW)
Lars = remove_compiler_hooks(layerwise.Lars)
Lamb = remove_compiler_hooks(layerwise.Lamb)
CLASS_USAGE = "Class(parameters, lr=...) is called; momentum, nesterov and weight_decay are passed if it accepts them"


def build_optimizer(parameters: Iterable[nn.Parameter], cfg: Optim, *, scaled: bool = False) -> Optimizer:
    """Build the optimizer of a config; those of torch in fused form, one kernel for all parameters.

    With `scaled`, a GradScaler may skip steps. Adam is that of Kingma and Ba 2014 (arXiv 1412.6980), AdamW that of
    Loshchilov and Hutter 2017 (arXiv 1711.05101).
    """
    parameters = list(parameters)
    groups = group_by_decay(parameters) if cfg.decayed == "matrices" else parameters
    match cfg.name:
        case "adam":
            return Adam(groups, lr=cfg.lr, weight_decay=cfg.weight_decay, fused=True)
        case "adamw":
            return AdamW(groups, lr=cfg.lr, weight_decay=cfg.weight_decay, fused=True)
        case "lars":
            return Lars(groups, lr=cfg.lr, momentum=cfg.momentum, weight_decay=cfg.weight_decay, trust=cfg.trust)
        case "lamb":
            return Lamb(groups, lr=cfg.lr, weight_decay=cfg.weight_decay)
        case name if ":" in name:
            return build_custom_optimizer(groups, cfg)
    is_sharded = any(type(parameter) is not nn.Parameter for parameter in parameters)
    optimizer = SGD(
        groups,
        lr=cfg.lr,
        momentum=cfg.momentum,
        nesterov=cfg.nesterov and cfg.momentum > 0,
        weight_decay=cfg.weight_decay,
        fused=not is_sharded,  # torch has no fused SGD for sharded parameters
    )
    if scaled and cfg.momentum:
        # If the very first step is skipped, the fused kernel leaves the momentum buffer uninitialised. Zeros give the
        # same first step, to the bit: 0.9 * 0 + gradient.
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def build_custom_optimizer(groups: Any, cfg: Optim) -> Optimizer:
    """Build the optimizer of optim.name=FILE.py:Class with the settings that it accepts.

    Raises UserError, naming file and line, if it cannot be built or does not accept a setting other than 0.
    """
    value = custom_optimizer.FILES_OF_RUN.get(cfg.name, cfg.name)
    kind = load_function("optim.name", value, custom_optimizer.BUILTIN_NAMES["name"], "Class")
    with convert_errors_of_user_file("optim.name", value, vars(kind).get("__init__"), CLASS_USAGE):
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            raise TypeError("it is not a subclass of torch.optim.Optimizer")
        accepted = inspect.signature(kind).parameters
        if cfg.weight_decay and "weight_decay" not in accepted:
            raise ValueError(f"it does not accept weight_decay; omit optim.weight_decay={cfg.weight_decay:g}")
        settings: dict[str, Any] = {"lr": cfg.lr}
        for name in ("momentum", "nesterov", "weight_decay"):
            if name in accepted:
                settings[name] = getattr(cfg, name)
        return kind(groups, **settings)


def group_by_decay(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Return parameter groups with weight decay, and without it for biases and scales of normalisation layers."""
    matrices: dict[str, Any] = {"params": []}
    vectors: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    for parameter in parameters:
        group = vectors if parameter.ndim < 2 else matrices
        group["params"].append(parameter)
    return [group for group in (matrices, vectors) if group["params"]]


def compute_learning_rate(cfg: Optim, step: int, total: int, batch: int) -> float:
    """Return the learning rate of a step, counted from 0, in a run of `total` steps with `batch` samples each.

    It is proportional to the batch if optim.base_batch is set, and rises during the warm-up (Goyal et al. 2017, arXiv
    1706.02677). The cosine decay is that of Loshchilov and Hutter 2016 (arXiv 1608.03983) without restarts, the step
    decay that of He et al. 2015 (arXiv 1512.03385). Raises UserError if a custom decay returns no valid factor.
    """
    peak = cfg.lr * batch / cfg.base_batch if cfg.base_batch else cfg.lr
    if step < cfg.warmup:
        return peak * (step + 1) / cfg.warmup
    decay_step = step - cfg.warmup
    decay_steps = max(1, total - cfg.warmup)
    done = decay_step / decay_steps
    match cfg.decay:
        case "cosine":
            return peak * (1 + math.cos(math.pi * done)) / 2
        case "linear":
            return peak * (1 - done)
        case "step":
            return peak * (1.0 if done < 0.5 else 0.1 if done < 0.75 else 0.01)
        case "constant":
            return peak
    return peak * custom_optimizer.compute_custom_decay(cfg.decay, decay_step, decay_steps)


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr
