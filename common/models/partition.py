"""Partition of a sequential model into stages of about equal cost.

A stage keeps the names of its layers: the union of all stages' state dicts is the state dict of the model.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn

from common.measure.timing import time_calls


def keep_input_unchanged(layer: nn.Module) -> None:
    """Let a layer's first operation leave the input as it is: autograd refuses to overwrite what a stage is given."""
    first = next(module for module in layer.modules() if not any(module.children()))
    if hasattr(first, "inplace"):
        setattr(first, "inplace", False)  # noqa: B010 (as an assignment it needs a type)


def split_into_stages(model: nn.Sequential, starts: Sequence[str]) -> list[nn.Sequential]:
    """Split a model into stages; `starts` names the layers that begin a new stage, in order.

    The stages share the model's layers (no copy); none overwrites what it is given. Raises ValueError for a name that
    is not a layer, is the first one, or is out of order.
    """
    layers = list(model.named_children())
    names = [name for name, _ in layers]
    bad = [name for name in starts if name not in names[1:]]
    if bad:
        raise ValueError(f"split: {bad[0]} cannot begin a stage; choose from {', '.join(names[1:])}")
    bounds = [0, *(names.index(name) for name in starts), len(names)]
    if sorted(set(bounds)) != bounds:
        raise ValueError(f"split: {', '.join(starts)} is not in the order of the layers {', '.join(names)}")
    for start in bounds[1:-1]:
        keep_input_unchanged(layers[start][1])
    return [nn.Sequential(OrderedDict(layers[a:b])) for a, b in pairwise(bounds)]


def balance_stages(costs: Mapping[str, float], stages: int) -> list[str]:
    """Return the layers that begin a new stage, so that the costliest stage is as cheap as possible.

    `costs` holds the cost of each layer in order, in any unit. Exact, by dynamic programming over the linear partition
    problem, as PipeDream does it for stages on equal devices (Harlap et al. 2018, arXiv 1806.03377).
    Raises ValueError for more stages than layers.
    """
    names, values = list(costs), list(costs.values())
    if stages > len(names):
        raise ValueError(f"stages={stages} exceeds the {len(names)} layers of the model")
    # best[n] = (cost of the costliest stage, first layers of the stages) for layers 0 to n - 1
    best = {n: (sum(values[:n]), [0]) for n in range(1, len(names) + 1)}
    for count in range(2, stages + 1):
        best = {
            n: min((max(best[m][0], sum(values[m:n])), [*best[m][1], m]) for m in range(count - 1, n))
            for n in range(count, len(names) + 1)
        }
    return [names[start] for start in best[len(names)][1][1:]]


def count_parameters(model: nn.Sequential) -> dict[str, float]:
    """Return the number of parameters of each layer, as a cost for `balance_stages`."""
    return {name: float(sum(p.numel() for p in layer.parameters())) for name, layer in model.named_children()}


def time_layers(model: nn.Sequential, x: Tensor, repeats: int = 10) -> dict[str, float]:
    """Return the seconds of forward and backward of each layer for the input x [N, ...], medians of `repeats`.

    As in training, no gradient of `x` itself is computed. One copied layer at a time is on the device of `x`: this
    also measures a model that fits on no single device, and leaves the model unchanged.
    """
    costs: dict[str, float] = {}
    for number, (name, layer) in enumerate(model.named_children()):
        twin = copy.deepcopy(layer).to(x.device).train()  # a copy: BatchNorm updates its statistics
        keep_input_unchanged(twin)
        x = x.detach().requires_grad_(number > 0 and x.is_floating_point())
        costs[name] = median(time_calls(partial(run_forward_backward, twin, x), x.device, repeats))
        x = twin(x)
    return costs


def run_forward_backward(layer: nn.Module, x: Tensor) -> None:
    """Compute the output of a layer for x [N, ...], and the gradients of its parameters and of x if it requires one."""
    out = layer(x)
    wanted = [tensor for tensor in (x, *layer.parameters()) if tensor.requires_grad]
    if wanted:  # none in a first layer without parameters
        torch.autograd.grad(out, wanted, torch.ones_like(out))
