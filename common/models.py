"""The models. Each is a `nn.Sequential` of named layers, so that any of them can be cut into stages."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

from torch import Tensor, nn


class LinearReLU(nn.Linear):
    """A linear layer with its ReLU: one unit that no cut can part."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class FlatLinearReLU(LinearReLU):
    """A linear layer with its ReLU that takes images [N, H, W] or [N, C, H, W] as vectors."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(1))


class SimpleNN(nn.Sequential):
    """The 784-128-64-10 network for MNIST; with `width` and `depth`, a wider and deeper one.

    `depth` hidden layers have `width` units each, but the last one has half as many. Layers are
    named fc1, fc2, ... Takes images [N, 28, 28], gives logits [N, 10].
    """

    def __init__(self, width: int = 128, depth: int = 2) -> None:
        sizes = [28 * 28, *[width] * (depth - 1), width // 2]
        if depth == 1:
            sizes = [28 * 28, width]
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for i, (before, after) in enumerate(pairwise(sizes), start=1):
            layers[f"fc{i}"] = LinearReLU(before, after) if i > 1 else FlatLinearReLU(before, after)
        layers[f"fc{depth + 1}"] = nn.Linear(sizes[-1], 10)
        super().__init__(layers)
