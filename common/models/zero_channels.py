"""Removal of channels whose weights are zero, for example after structured pruning. The outputs do not change."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from common.models.networks import BasicBlock, Bottleneck, ConvReLU, FlatLinearReLU, ImageConv2d, LinearReLU
from common.models.sample_dropout import SampleDropout

WEIGHTED = (nn.Linear, LinearReLU, FlatLinearReLU, nn.Conv2d, ImageConv2d, ConvReLU)
"""Layers that produce and consume channels. A subclass in a custom network may compute something else."""
CHANNELWISE = (
    *(nn.ReLU, nn.AvgPool2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.Flatten, nn.Identity),
    *(nn.Dropout, SampleDropout),  # in eval mode, these layers return their inputs
)
"""Layers that compute each channel separately."""


class Link(NamedTuple):
    """A layer, the layer that consumes its channels, and the BatchNorm layers in between."""

    producer: nn.Module
    norms: tuple[nn.BatchNorm2d, ...]
    consumer: nn.Module


@torch.no_grad()
def remove_zero_channels(model: nn.Module, x: Tensor) -> nn.Module:
    """Return a copy of a model without the channels whose weights are all zero.

    The model must be in eval mode. x [n, ...] is any input. The output of such a channel is constant, so its effect on
    the next layer is added to the bias of that layer. A channel is kept if that is impossible, because a padded
    convolution or a layer without bias consumes a constant other than zero, or because the channel is added to those of
    a shortcut. Every layer keeps at least one channel. A custom network that is not a plain nn.Sequential is returned
    unchanged, because the order of its layers is unknown.
    """
    if not is_sequence(model):
        return model
    smaller = copy.deepcopy(model)
    links = list(find_links(smaller))
    layers = [link.producer for link in links] + [link.consumer for link in links]
    inputs = record_inputs(smaller, layers, x)
    for link in links:
        if has_channels_in_second_axis(link, inputs):
            remove_channels_of_link(link, inputs[link.consumer])
    return smaller


def is_sequence(model: nn.Module) -> bool:
    """Return whether a model applies its layers in their order, each layer once."""
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        return False
    return len(model) == len(set(model))


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())


def find_links(model: nn.Module) -> Iterator[Link]:
    """Yield, in the order of the layers, the links from which channels can be removed."""
    producer: nn.Module | None = None
    norms: list[nn.BatchNorm2d] = []
    for layer in model.children():
        if has_plain_weight(layer):
            if producer is not None:
                yield Link(producer, tuple(norms), layer)
            producer = layer
            norms = []
        elif type(layer) is nn.BatchNorm2d:
            norms.append(layer)
        elif type(layer) not in CHANNELWISE:
            producer = None
        if isinstance(layer, BasicBlock | Bottleneck):
            yield Link(layer.conv1, (layer.bn1,), layer.conv2)
        if isinstance(layer, Bottleneck):
            yield Link(layer.conv2, (layer.bn2,), layer.conv3)


def has_plain_weight(layer: nn.Module) -> bool:
    """Return whether a layer is a linear layer or convolution with one group, whose weight is a parameter."""
    names = {name for name, _ in layer.named_parameters(recurse=False)}
    return type(layer) in WEIGHTED and names in ({"weight"}, {"weight", "bias"}) and getattr(layer, "groups", 1) == 1


def has_channels_in_second_axis(link: Link, inputs: Mapping[nn.Module, Tensor]) -> bool:
    """Return whether the second axis of the consumer's inputs contains the channels. `inputs` are those of each layer.

    A linear layer also accepts inputs with more axes, such as [n, time, channels].
    """
    for layer in (link.producer, link.consumer):
        if type(layer) in (nn.Linear, LinearReLU) and inputs[layer].dim() != 2:
            return False
    return True


def record_inputs(model: nn.Module, layers: list[nn.Module], x: Tensor) -> dict[nn.Module, Tensor]:
    """Return the inputs [n, ...] of layers when the model computes its outputs for x [n, ...]."""
    inputs: dict[nn.Module, Tensor] = {}
    handles = []
    for layer in layers:
        handles.append(layer.register_forward_pre_hook(lambda layer, args: inputs.update({layer: args[0]})))
    model(x)
    for handle in handles:
        handle.remove()
    return inputs


def remove_channels_of_link(link: Link, consumed: Tensor) -> None:
    """Remove the zero channels of a link's producer. `consumed` [n, ...] is an input of the consumer."""
    producer = link.producer
    consumer = link.consumer
    assert isinstance(producer, nn.Linear | nn.Conv2d)
    assert isinstance(consumer, nn.Linear | nn.Conv2d)
    channels = len(producer.weight)
    # of a linear layer's inputs, several consecutive ones may belong to one channel
    columns = consumer.weight.reshape(len(consumer.weight), channels, -1)
    values = consumed[0].reshape(channels, -1)
    constants = values[:, 0]

    is_removed = (producer.weight.flatten(1) == 0).all(1)
    is_removed &= (values == constants[:, None]).all(1)  # false at the border after a padded nn.AvgPool2d
    is_padded = isinstance(consumer, nn.Conv2d) and any(consumer.padding)
    if is_padded or consumer.bias is None:
        is_removed &= constants == 0
    if is_removed.all():
        is_removed[0] = False
    remaining = (~is_removed).nonzero().flatten()

    if consumer.bias is not None:
        effects = columns[:, is_removed].sum(2).double() @ constants[is_removed].double()
        consumer.bias.add_(effects.to(consumer.bias))
    weight = columns[:, remaining].reshape(len(consumer.weight), -1, *consumer.weight.shape[2:])
    consumer.weight = nn.Parameter(weight, requires_grad=False)
    for layer in (producer, *link.norms):
        select_channels(layer, remaining)
    if isinstance(consumer, nn.Conv2d):
        consumer.in_channels = consumer.weight.size(1)
    else:
        consumer.in_features = consumer.weight.size(1)


def select_channels(layer: nn.Module, remaining: Tensor) -> None:
    """Keep only some of the output channels of a layer."""
    for name, parameter in list(layer.named_parameters(recurse=False)):
        setattr(layer, name, nn.Parameter(parameter[remaining].clone(), requires_grad=False))
    for name, buffer in list(layer.named_buffers(recurse=False)):
        if buffer.dim():
            layer.register_buffer(name, buffer[remaining].clone())
    for name in ("out_features", "out_channels", "num_features"):
        if hasattr(layer, name):
            setattr(layer, name, len(remaining))
