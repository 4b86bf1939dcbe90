"""Construction of optimizers."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from common.config.custom_function import convert_errors_of_user_file, load_function
from common.training import custom_optimizer
from configs.shared import Optim

T = TypeVar("T", bound=Optimizer)


def unwrap_compiler_decorators(kind: type[T]) -> type[T]:
    """Return a subclass of a torch optimizer class whose methods do not import the compiler.

    On first use, every optimizer of torch imports torch._dynamo, which takes a second even if nothing is compiled. The
    unwrapped methods compute the same values.
    """
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict", "step")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    methods["step"] = torch.no_grad()(methods["step"])
    return type(kind.__name__, (kind,), methods)


SGD = unwrap_compiler_decorators(torch.optim.SGD)
Adam = unwrap_compiler_decorators(torch.optim.Adam)
AdamW = unwrap_compiler_decorators(torch.optim.AdamW)
STEP_COUNTER_BYTES = 4
"""Size of the number of steps that Adam stores for each parameter."""
CLASS_USAGE = "the class must accept parameters and lr, and may accept momentum, nesterov, and weight_decay"


def build_optimizer(parameters: Iterable[nn.Parameter], cfg: Optim, *, scaled: bool = False) -> Optimizer:
    """Build the optimizer that a config describes.

    For optimizers of torch, the fused implementation is used if available; it updates all parameters in one kernel. Set
    `scaled` to True if a GradScaler may skip steps. Sources: Adam, Kingma and Ba 2014 (arXiv 1412.6980); AdamW,
    Loshchilov and Hutter 2017 (arXiv 1711.05101).
    """
    parameters = list(parameters)
    groups = group_parameters_by_weight_decay(parameters) if cfg.decayed == "matrices" else parameters
    match cfg.name:
        case "adam":
            return Adam(groups, lr=cfg.lr, weight_decay=cfg.weight_decay, fused=True)
        case "adamw":
            return AdamW(groups, lr=cfg.lr, weight_decay=cfg.weight_decay, fused=True)
        case "lars" | "lamb":
            return build_layerwise_optimizer(groups, cfg)
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
        # If the first step is skipped, the fused kernel leaves the momentum buffer uninitialized. With a buffer of
        # zeros, the first step is bitwise the same, because 0.9 * 0 + gradient equals the gradient.
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def build_layerwise_optimizer(groups: Any, cfg: Optim) -> Optimizer:
    """Build LARS or LAMB."""
    from common.training import layerwise  # few runs need this module

    if cfg.name == "lars":
        lars = unwrap_compiler_decorators(layerwise.Lars)
        return lars(groups, lr=cfg.lr, momentum=cfg.momentum, weight_decay=cfg.weight_decay, trust=cfg.trust)
    lamb = unwrap_compiler_decorators(layerwise.Lamb)
    return lamb(groups, lr=cfg.lr, weight_decay=cfg.weight_decay)


def build_custom_optimizer(groups: Any, cfg: Optim) -> Optimizer:
    """Build the optimizer for optim.name=FILE.py:Class with the settings that the class accepts.

    Raises UserError with the file and line if the class cannot be constructed, or if the class does not accept
    weight_decay although optim.weight_decay is set.
    """
    kind = load_function("optim.name", cfg.name, custom_optimizer.BUILTIN_NAMES["name"], "Class")
    with convert_errors_of_user_file("optim.name", cfg.name, vars(kind).get("__init__"), CLASS_USAGE):
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            raise TypeError("the class is not a subclass of torch.optim.Optimizer")
        accepted = inspect.signature(kind).parameters
        if cfg.weight_decay and "weight_decay" not in accepted:
            raise ValueError(f"the class does not accept weight_decay; omit optim.weight_decay={cfg.weight_decay:g}")
        settings: dict[str, Any] = {"lr": cfg.lr}
        for name in ("momentum", "nesterov", "weight_decay"):
            if name in accepted:
                settings[name] = getattr(cfg, name)
        return kind(groups, **settings)


def predict_state_bytes(cfg: Optim, sizes: Sequence[int], element_bytes: int) -> int | None:
    """Return the size of an optimizer's state after the first step, for parameters with these numbers of values.

    SGD with momentum stores one value for each value of a parameter. Adam and AdamW store two values, and the number of
    steps for each parameter. Returns None for other optimizers.
    """
    match cfg.name:
        case "sgd":
            return sum(sizes) * element_bytes if cfg.momentum else 0
        case "adam" | "adamw":
            return 2 * sum(sizes) * element_bytes + STEP_COUNTER_BYTES * len(sizes)
    return None


def group_parameters_by_weight_decay(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Divide the parameters into a group with weight decay and a group without weight decay.

    Biases and the scales of normalization layers have no weight decay. Empty groups are omitted.
    """
    matrices: dict[str, Any] = {"params": []}
    vectors: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    for parameter in parameters:
        group = vectors if parameter.ndim < 2 else matrices
        group["params"].append(parameter)
    return [group for group in (matrices, vectors) if group["params"]]
