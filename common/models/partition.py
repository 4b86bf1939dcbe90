"""Partition of a sequential model into stages of about equal cost.

A stage keeps the names of its layers: the union of all stages' state dicts is the state dict of the model.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn

from common.measure.timing import time_calls


def starts_in_place(stage: nn.Module) -> bool:
    """Return whether a stage's first layer overwrites its input, which autograd allows on a copy only."""
    first = next((module for module in stage.modules() if not any(module.children())), None)
    return bool(getattr(first, "inplace", False))


def split_into_stages(model: nn.Sequential, starts: Sequence[str]) -> list[nn.Sequential]:
    """Split a model into stages; `starts` names the layers that begin a new stage, in order.

    The stages share the model's layers (no copy). Raises ValueError for a name that is not a layer, is the first one,
    or is out of order.
    """
    layers = list(model.named_children())
    names = [name for name, _ in layers]
    bad = [name for name in starts if name not in names[1:]]
    if bad:
        raise ValueError(f"split: {bad[0]} cannot begin a stage; choose from {', '.join(names[1:])}")
    bounds = [0, *(names.index(name) for name in starts), len(names)]
    if sorted(set(bounds)) != bounds:
        raise ValueError(f"split: {', '.join(starts)} is not in the order of the layers {', '.join(names)}")
    return [nn.Sequential(OrderedDict(layers[a:b])) for a, b in pairwise(bounds)]


def balance_stages(costs: Mapping[str, float], stages: int) -> list[str]:
    """Return the layers that begin a new stage, so that the costliest stage is as cheap as possible.

    `costs` holds the cost of each layer in order, in any unit. Exact, by dynamic programming over the linear partition
    problem, as PipeDream does it for stages on equal devices (Narayanan et al. 2019; arXiv 1806.03377, section 3.1).
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
        x = x.detach().requires_grad_(number > 0 and x.is_floating_point())
        step = LayerStep(twin, x)
        costs[name] = median(time_calls(step, x.device, repeats, prepare=step.prepare))
        x = step.output
    return costs


class LayerStep:
    """Forward and backward of one layer on one input, for `time_calls`; keeps the output of the newest call."""

    def __init__(self, layer: nn.Module, x: Tensor) -> None:
        self.layer, self.x = layer, x
        self.copies = starts_in_place(layer)

    def prepare(self) -> None:
        """Clear the gradients, and copy the input of a layer that overwrites it."""
        self.layer.zero_grad(set_to_none=True)
        self.x.grad = None
        self.given = self.x.clone() if self.copies else self.x

    def __call__(self) -> None:
        self.output = self.layer(self.given)
        if self.output.requires_grad:  # not behind a first layer without parameters
            self.output.backward(torch.ones_like(self.output))
