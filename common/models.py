"""The models. Each is a `nn.Sequential` of named layers, so that any of them can be cut into stages.

Images are [N, H, W] (grey) or [N, C, H, W]; a shape is that of one image, without N.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
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


def colours(shape: Sequence[int]) -> int:
    return shape[0] if len(shape) == 3 else 1


class ImageConv2d(nn.Conv2d):
    """A convolution that takes grey images [N, H, W] too."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input if input.dim() == 4 else input.unsqueeze(1))


class ConvReLU(ImageConv2d):
    """A convolution with its ReLU."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class ConvNet(nn.Sequential):
    """Two 3x3 convolutions of 32 and 64 channels, average pooling, 100 units, and the classes."""

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        layers["conv1"] = ConvReLU(colours(shape), 32, 3)
        layers["conv2"] = ConvReLU(32, 64, 3)
        layers["pool"] = nn.AvgPool2d(2)
        layers["fc1"] = FlatLinearReLU(flat_size(nn.Sequential(layers), shape), 100)
        layers["fc2"] = nn.Linear(100, classes)
        super().__init__(layers)


@torch.no_grad()
def flat_size(layers: nn.Sequential, shape: Sequence[int]) -> int:
    """The numbers that come out of the layers for one image: computed, not guessed."""
    return layers(torch.zeros(1, *shape)).numel()


class Block(nn.Module):
    """ResNet's basic block: two 3x3 convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        return F.relu(out + self.downsample(x), inplace=True)


class ResNet18(nn.Sequential):
    """ResNet-18 (He et al. 2015, arXiv 1512.03385) with the CIFAR stem: a 3x3 convolution and no pooling."""

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        layers["conv1"] = ImageConv2d(colours(shape), 64, 3, 1, 1, bias=False)
        layers["bn1"] = nn.BatchNorm2d(64)
        layers["relu"] = nn.ReLU(inplace=True)
        before = 64
        for group, width in enumerate((64, 128, 256, 512), start=1):
            for number in range(2):
                layers[f"layer{group}_{number}"] = Block(before, width, 2 if group > 1 and number == 0 else 1)
                before = width
        layers["pool"] = nn.AdaptiveAvgPool2d(1)
        layers["flatten"] = nn.Flatten()
        layers["fc"] = nn.Linear(512, classes)
        super().__init__(layers)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def for_images(name: str, shape: Sequence[int], classes: int) -> nn.Sequential:
    """The model of that name for images of one shape."""
    kind = ResNet18 if name == "resnet18" else ConvNet
    return kind(shape, classes)
