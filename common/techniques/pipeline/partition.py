"""Partition of a sequential model into stages of roughly equal cost.

Each stage keeps the names of its layers, so the union of the stages' state dicts is the state dict of the model.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn

from common.measure.timing import time_calls


def keep_input_unchanged(layer: nn.Module) -> None:
    """Make the first operation of a layer out-of-place if it is in-place.

    This is necessary for the first layer of a stage, because autograd does not allow a stage to overwrite its input.
    """
    first = next(module for module in layer.modules() if not any(module.children()))
    if hasattr(first, "inplace"):
        setattr(first, "inplace", False)  # noqa: B010 (a direct assignment fails type checking)


def split_into_stages(model: nn.Sequential, starts: Sequence[str]) -> list[nn.Sequential]:
    """Split a model into stages.

    `starts` contains, in order, the names of the layers that begin a new stage. The stages share the model's layers and
    do not overwrite their inputs. Raises ValueError if `starts` contains the first layer or an unknown layer, or if its
    layers are out of order.
    """
    layers = list(model.named_children())
    names = [name for name, _ in layers]
    for name in starts:
        if name not in names[1:]:
            raise ValueError(f"split: {name} cannot begin a stage; choose from {', '.join(names[1:])}")
    bounds = [0, *map(names.index, starts), len(names)]
    if sorted(set(bounds)) != bounds:
        raise ValueError(f"split: {', '.join(starts)} must be in the order of the layers {', '.join(names)}")
    for start in bounds[1:-1]:
        keep_input_unchanged(layers[start][1])
    return [nn.Sequential(OrderedDict(layers[start:end])) for start, end in pairwise(bounds)]


def balance_stages(costs: Mapping[str, float], stages: int) -> list[str]:
    """Return the names of the layers that begin a new stage in the optimal partition.

    The optimal partition minimizes the cost of the most expensive stage. `costs` contains the cost of each layer, in
    the order of the layers and in any unit. The exact solution of this linear partition problem is computed by dynamic
    programming, as PipeDream does for stages on equal devices (Harlap et al. 2018, arXiv 1806.03377). A stage whose
    layers cost nothing counts as infinitely expensive, because a stage without parameters cannot be trained. Raises
    ValueError if there are more stages than layers.
    """
    names = list(costs)
    layer_costs = list(costs.values())
    if stages > len(names):
        raise ValueError(f"stages={stages} exceeds the {len(names)} layers of the model")

    # best[n] describes the best partition of layers 0 to n - 1: (cost of the most expensive stage, first layers)
    Split = tuple[float, list[int]]
    best: dict[int, Split] = {n: (sum(layer_costs[:n]) or math.inf, [0]) for n in range(1, len(names) + 1)}
    for count in range(2, stages + 1):
        previous = best
        best = {}
        for n in range(count, len(names) + 1):
            candidates: list[Split] = []
            for start in range(count - 1, n):
                max_cost, starts = previous[start]
                last_cost = sum(layer_costs[start:n]) or math.inf
                candidates.append((max(max_cost, last_cost), [*starts, start]))
            best[n] = min(candidates)
    _, starts = best[len(names)]
    return [names[start] for start in starts[1:]]


def count_parameters(model: nn.Sequential) -> dict[str, float]:
    """Return the number of parameters of each layer by name; `balance_stages` can use these numbers as costs."""
    counts: dict[str, float] = {}
    for name, layer in model.named_children():
        counts[name] = float(sum(parameter.numel() for parameter in layer.parameters()))
    return counts


def time_layers(model: nn.Sequential, x: Tensor, repeats: int = 10) -> dict[str, float]:
    """Return the time of a forward and backward pass of each layer, in seconds, for the input x [N, ...].

    Each time is the median of `repeats` measurements. As in training, the gradient of the model's input is not
    computed. The device of `x` holds a copy of only one layer at a time, so the model may be larger than the device's
    memory. The model is not modified.
    """
    costs: dict[str, float] = {}
    for number, (name, layer) in enumerate(model.named_children()):
        layer_copy = copy.deepcopy(layer).to(x.device).train()  # BatchNorm in the copy updates its statistics
        keep_input_unchanged(layer_copy)
        x = x.detach().requires_grad_(number > 0 and x.is_floating_point())
        seconds = time_calls(partial(run_forward_backward, layer_copy, x), x.device, repeats)
        costs[name] = median(seconds)
        x = layer_copy(x)
    return costs


def run_forward_backward(layer: nn.Module, x: Tensor) -> None:
    """Compute a layer's output for x [N, ...] and the gradients of its parameters.

    The gradient of x is also computed if x requires a gradient.
    """
    outputs = layer(x)
    inputs = [tensor for tensor in (x, *layer.parameters()) if tensor.requires_grad]
    if inputs:  # the list is empty for a first layer without parameters
        torch.autograd.grad(outputs, inputs, torch.ones_like(outputs))
