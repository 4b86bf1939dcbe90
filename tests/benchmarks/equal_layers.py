"""A network whose layers take equally long in the forward and in the backward pass, also the first and the last."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

LAYERS = 16


class Scale(nn.Module):
    """Flatten inputs [N, ...] and multiply each value by a weight: outputs [N, values].

    The outputs need a gradient. The following layer therefore computes the gradient of its input, as all others do.
    """

    def __init__(self, values: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(values))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) * self.weight


class EqualLayers(nn.Sequential):
    """Layers `layer1` to `layer16` of equal width, between a scale and a small output layer whose times are negligible.

    The width is the number of values in one input.
    """

    def __init__(self, shape: Sequence[int], outputs: int) -> None:
        super().__init__()
        width = math.prod(shape)
        self.scale = Scale(width)
        for number in range(1, LAYERS + 1):
            self.add_module(f"layer{number}", nn.Sequential(nn.Linear(width, width), nn.ReLU()))
        self.output = nn.Linear(width, outputs)
