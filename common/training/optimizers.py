"""Optimizers and the learning rate as a function of the step (so there is no scheduler state to lose)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from common.core.own_function import load_function, locate_errors
from common.training.optimization import layerwise, own_files
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
Lars = remove_compiler_hooks(layerwise.Lars)
Lamb = remove_compiler_hooks(layerwise.Lamb)
USAGE = "Class(parameters, lr=...) is built; momentum, nesterov and weight_decay are passed where it has them"


def build_optimizer(parameters: Iterable[nn.Parameter], cfg: Optim, *, scaled: bool = False) -> Optimizer:
    """Build the optimizer that the config names; those of torch in their fused form: one kernel for all parameters.

    With `scaled` a GradScaler may leave steps out. Adam is of Kingma and Ba 2014 (arXiv 1412.6980), AdamW of Loshchilov
    and Hutter 2017 (arXiv 1711.05101).
    """
    parameters = list(parameters)
    groups = group_by_decay(parameters) if cfg.decayed == "matrices" else parameters
    shared: Any = {"lr": cfg.lr, "weight_decay": cfg.weight_decay}
    match cfg.name:
        case "adam" | "adamw":
            return (AdamW if cfg.name == "adamw" else Adam)(groups, **shared, fused=True)
        case "lars":
            return Lars(groups, momentum=cfg.momentum, trust=cfg.trust, **shared)
        case "lamb":
            return Lamb(groups, **shared)
        case name if ":" in name:
            return build_own_optimizer(groups, cfg)
    optimizer = SGD(
        groups,
        momentum=cfg.momentum,
        nesterov=cfg.nesterov and cfg.momentum > 0,
        fused=all(type(parameter) is nn.Parameter for parameter in parameters),  # not written for sharded ones
        **shared,
    )
    if scaled and cfg.momentum:
        # where the very first step is left out, the fused kernel leaves the momentum as memory happened to be;
        # 0.9 * 0 + gradient is what a first step makes of it, to the bit
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def build_own_optimizer(groups: Any, cfg: Optim) -> Optimizer:
    """Build the optimizer of optim.name=FILE.py:Class, from the settings that it takes.

    Raises UserError, naming file and line, where it cannot be built, or does not take a setting that is not 0.
    """
    value = own_files.KEPT.get(cfg.name, cfg.name)
    kind = load_function("optim.name", value, own_files.KNOWN["name"], "Class")
    settings = {name: getattr(cfg, name) for name in ("lr", "momentum", "nesterov", "weight_decay")}
    with locate_errors("optim.name", value, vars(kind).get("__init__"), USAGE):
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            raise TypeError("it is no subclass of torch.optim.Optimizer")
        takes = inspect.signature(kind).parameters
        if cfg.weight_decay and "weight_decay" not in takes:
            raise ValueError(f"it takes no weight_decay; leave optim.weight_decay={cfg.weight_decay:g} out")
        return kind(groups, **{name: value for name, value in settings.items() if name in takes or name == "lr"})


def group_by_decay(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Return groups of parameters: those with weight decay, and biases and scales of normalisation, which have none."""
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for parameter in parameters:
        groups[parameter.ndim < 2]["params"].append(parameter)
    return [group for group in groups if group["params"]]


def compute_learning_rate(cfg: Optim, step: int, total: int, batch: int) -> float:
    """Return the learning rate of a step, counted from 0, in a run of `total` steps with `batch` samples each.

    It is proportional to the batch where optim.base_batch is set, and rises during the warm-up (Goyal et al. 2017,
    arXiv 1706.02677); the cosine decay is that of Loshchilov and Hutter 2016 (arXiv 1608.03983), without restarts, and
    the one in steps that of He et al. 2015 (arXiv 1512.03385). Raises UserError for a user's own that gives no rate.
    """
    peak = cfg.lr * batch / cfg.base_batch if cfg.base_batch else cfg.lr
    if step < cfg.warmup:
        return peak * (step + 1) / cfg.warmup
    done = (step - cfg.warmup) / max(1, total - cfg.warmup)
    match cfg.decay:
        case "cosine":
            return peak * (1 + math.cos(math.pi * done)) / 2
        case "linear":
            return peak * (1 - done)
        case "step":
            return peak * (1.0 if done < 0.5 else 0.1 if done < 0.75 else 0.01)
        case "constant":
            return peak
    return peak * own_files.compute_own_decay(cfg.decay, step - cfg.warmup, max(1, total - cfg.warmup))


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr
