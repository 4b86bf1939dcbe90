"""Networks for classification, each an `nn.Sequential` that can be split into stages.

All networks accept images [N, H, W] (grayscale) or [N, C, H, W] and return logits [N, classes]. The argument `shape` is
the shape of one image, without the batch dimension N. The attribute `recipe` contains the class and the constructor
arguments from which an identical network can be built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.config.lookup import import_object
from common.system.errors import UserError

Recipe = dict[str, Any]
"""The class name of a network under the key "class", and its constructor arguments under the key "arguments"."""


def make_recipe(kind: str, **arguments: Any) -> Recipe:
    """Return a dict with the class name and the constructor arguments of a network.

    The arguments must have types that JSON supports.
    """
    return {"class": kind, "arguments": arguments}


class LinearReLU(nn.Linear):
    """A linear layer followed by a ReLU, with inputs [N, in] and outputs [N, out].

    The linear layer and the ReLU form one module, so that both are always in the same pipeline stage.
    """

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class FlatLinearReLU(LinearReLU):
    """A linear layer followed by a ReLU, applied to flattened inputs.

    Inputs [N, ...] are flattened to [N, in] first.
    """

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(1))


class SimpleNN(nn.Sequential):
    """A multilayer perceptron, by default the 784-128-64-10 network for MNIST.

    The network has `depth` hidden layers of `width` units. If there are several hidden layers, the last hidden layer
    has half as many units. Layers are named fc1, fc2, and so on. The network maps inputs [N, *shape] to logits [N,
    classes].
    """

    def __init__(self, width: int = 128, depth: int = 2, shape: Sequence[int] = (28, 28), classes: int = 10) -> None:
        super().__init__()
        last_width = width // 2 if depth > 1 else width
        sizes = [math.prod(shape), *[width] * (depth - 1), last_width]
        for i, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
            kind = FlatLinearReLU if i == 1 else LinearReLU
            self.add_module(f"fc{i}", kind(inputs, outputs))
        self.add_module(f"fc{depth + 1}", nn.Linear(sizes[-1], classes))
        self.recipe = make_recipe("SimpleNN", width=width, depth=depth, shape=list(shape), classes=classes)


class Toy(nn.Sequential):
    """A network of two linear layers with 10 hidden units, for inputs of any shape.

    For the data set `vectors`, the layer sizes are 10-10-5.
    """

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__()
        self.net1 = FlatLinearReLU(math.prod(shape), 10)
        self.net2 = nn.Linear(10, classes)
        self.recipe = make_recipe("Toy", shape=list(shape), classes=classes)


def count_channels(shape: Sequence[int]) -> int:
    """Return the number of channels of images with the given shape.

    The number of channels is C for the shape [C, H, W], and 1 for the shape [H, W]. Raises UserError for the shape of a
    vector.
    """
    if len(shape) < 2:
        raise UserError(f"the network needs images, got vectors of {shape[0]} numbers; use another network")
    return shape[0] if len(shape) == 3 else 1


class ImageConv2d(nn.Conv2d):
    """A 2D convolution that also accepts grayscale images without a channel dimension.

    Images [N, H, W] are treated as [N, 1, H, W].
    """

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input if input.dim() == 4 else input.unsqueeze(1))


class ConvReLU(ImageConv2d):
    """A 2D convolution followed by a ReLU, combined in one module."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class ConvNet(nn.Sequential):
    """A small convolutional network.

    The network consists of two 3x3 convolutions with 32 and 64 channels, 2x2 average pooling, a linear layer with 100
    units, and a linear layer with one unit per class.
    """

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__()
        self.conv1 = ConvReLU(count_channels(shape), 32, 3)
        self.conv2 = ConvReLU(32, 64, 3)
        self.pool = nn.AvgPool2d(2)
        self.fc1 = FlatLinearReLU(count_features(self, shape), 100)
        self.fc2 = nn.Linear(100, classes)
        self.recipe = make_recipe("ConvNet", shape=list(shape), classes=classes)


class LeNet300(nn.Sequential):
    """LeNet-300-100 (LeCun et al. 1998), with 266,610 parameters for 28x28 images and 10 classes."""

    def __init__(self, shape: Sequence[int] = (28, 28), classes: int = 10) -> None:
        super().__init__()
        self.fc1 = FlatLinearReLU(math.prod(shape), 300)
        self.fc2 = LinearReLU(300, 100)
        self.fc3 = nn.Linear(100, classes)
        self.recipe = make_recipe("LeNet300", shape=list(shape), classes=classes)


class LeNet5(nn.Sequential):
    """Caffe's variant of LeNet-5, which is common in papers on pruning.

    The network consists of two 5x5 convolutions with 20 and 50 channels, each followed by 2x2 max pooling, and of two
    linear layers with 500 units and one unit per class. The network has 431,080 parameters for 28x28 images and 10
    classes.
    """

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__()
        self.conv1 = ImageConv2d(count_channels(shape), 20, 5)
        self.pool1 = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.pool2 = nn.MaxPool2d(2)
        self.fc1 = FlatLinearReLU(count_features(self, shape), 500)
        self.fc2 = nn.Linear(500, classes)
        self.recipe = make_recipe("LeNet5", shape=list(shape), classes=classes)


@torch.no_grad()
def count_features(layers: nn.Sequential, shape: Sequence[int]) -> int:
    """Return the number of values that the layers output for one image.

    A forward pass with a tensor of zeros [1, *shape] determines the number of values. Raises UserError if images of the
    given shape are too small for the layers.
    """
    try:
        return layers(torch.zeros(1, *shape)).numel()
    except RuntimeError as error:
        raise UserError(f"images of shape {list(shape)} are too small for this network ({error})") from None


def make_shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """Return the shortcut of a residual block.

    The shortcut is the identity if the block keeps the shape of its input. Otherwise, the shortcut is a 1x1 convolution
    followed by BatchNorm.
    """
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    projection = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False)
    return nn.Sequential(projection, nn.BatchNorm2d(out_channels))


class BasicBlock(nn.Module):
    """The basic block of a ResNet: two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = make_shortcut(in_channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.bn1(self.conv1(x)), inplace=True)
        residual = self.bn2(self.conv2(hidden))
        return F.relu(residual + self.downsample(x), inplace=True)


class Bottleneck(nn.Module):
    """The bottleneck block of a ResNet: 1x1, 3x3 and 1x1 convolutions, and a shortcut.

    The last convolution has four times as many output channels as the other two. As in torchvision (ResNet v1.5), the
    3x3 convolution applies the stride.
    """

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.downsample = make_shortcut(in_channels, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.bn1(self.conv1(x)), inplace=True)
        hidden = F.relu(self.bn2(self.conv2(hidden)), inplace=True)
        residual = self.bn3(self.conv3(hidden))
        return F.relu(residual + self.downsample(x), inplace=True)


RESNETS: dict[str, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, ...]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
}
"""Type of the residual blocks and number of blocks in each of the four groups, by model name."""
MIN_IMAGENET_PIXELS = 64
"""Minimum height or width of images for which a ResNet has the ImageNet stem."""


class ResNet(nn.Sequential):
    """A ResNet (He et al. 2015, arXiv 1512.03385).

    Each residual block is one layer of the nn.Sequential, named layer1_0, layer1_1, and so on. For images smaller than
    64 pixels, the network has the CIFAR stem, a 3x3 convolution without pooling. For all other images, the network has
    the ImageNet stem, a 7x7 convolution with stride 2 and max pooling. The argument `large` selects the ImageNet stem
    (True) or the CIFAR stem (False) regardless of the image size. `width` is the number of channels in the first group
    of blocks.
    """

    def __init__(
        self, name: str, shape: Sequence[int], classes: int, *, width: int = 64, large: bool | None = None
    ) -> None:
        super().__init__()
        kind, depths = RESNETS[name]
        if large is None:
            large = max(shape[-2:]) >= MIN_IMAGENET_PIXELS
        kernel_stride_padding = (7, 2, 3) if large else (3, 1, 1)
        self.conv1 = ImageConv2d(count_channels(shape), width, *kernel_stride_padding, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        if large:
            self.maxpool = nn.MaxPool2d(3, 2, 1)
        channels = width
        for group, depth in enumerate(depths):
            group_width = width << group  # the width doubles from group to group
            for number in range(depth):
                # In every group except the first group, the first block halves the height and width of the image.
                stride = 2 if group and not number else 1
                self.add_module(f"layer{group + 1}_{number}", kind(channels, group_width, stride))
                channels = group_width * kind.expansion
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(channels, classes)
        self.recipe = make_recipe("ResNet", name=name, shape=list(shape), classes=classes, width=width, large=large)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class ResNet18(ResNet):
    """ResNet-18 with the CIFAR stem for images of any size."""

    def __init__(self, shape: Sequence[int], classes: int) -> None:
        super().__init__("resnet18", shape, classes, large=False)
        self.recipe = make_recipe("ResNet18", shape=list(shape), classes=classes)


def build_network(name: str, shape: Sequence[int], classes: int) -> Any:
    """Build the network `name` for images of shape [H, W] or [C, H, W].

    The network is an nn.Sequential. A custom network FILE.py:Class may be any nn.Module. For texts, the shape is
    [tokens], and `classes` is the size of the vocabulary.
    """
    if ":" in name:
        return import_object("common.models.custom_network:build_custom_network")(name, shape, classes)
    if name == "mlp":
        return SimpleNN(shape=shape, classes=classes)
    if name == "resnet50":
        return ResNet(name, shape, classes)
    kinds = {"lenet300": LeNet300, "lenet5": LeNet5, "convnet": ConvNet, "resnet18": ResNet18}
    return kinds[name](shape, classes)


KINDS: dict[str, Callable[..., nn.Sequential]] = {
    kind.__name__: kind for kind in (SimpleNN, Toy, ConvNet, LeNet300, LeNet5, ResNet, ResNet18)
}


KINDS_BY_LOOKUP = {"GPT": "common.models.gpt:GPT"}
"""Import paths of further networks, which only runs that use them import."""


def find_kind(name: str) -> Callable[..., nn.Sequential] | None:
    """Return the class of a built-in network by its name, or None if there is no such class."""
    if name in KINDS_BY_LOOKUP:
        kind: Callable[..., nn.Sequential] = import_object(KINDS_BY_LOOKUP[name])
        return kind
    return KINDS.get(name)


def list_saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a model by name. A shared parameter has only its first name."""
    state = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in state}
    return dict(model.named_parameters()) | buffers
