"""Channels whose weights are zero are removed from a network without changing its outputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from common.models import networks
from common.models.zero_channels import count_parameters, remove_zero_channels


@torch.no_grad()
def prune_half_of_the_channels(model: nn.Module) -> None:
    weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    for weight in weights[:-1]:  # the last layer has one channel per class
        sums = weight.abs().flatten(1).sum(1)
        weight[sums.argsort()[: len(sums) // 2]] = 0


def build_model(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    model: nn.Sequential
    if name.startswith("resnet"):
        model = networks.ResNet(name, (3, 16, 16), 10, width=8)
    else:
        model = networks.build_network(name, (28, 28), 10)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):  # so that the channels of a pruned convolution are not zero
            nn.init.normal_(layer.bias)
    return model.eval()


@pytest.mark.parametrize("name", ["mlp", "lenet300", "lenet5", "convnet", "resnet18", "resnet50"])
def test_a_network_without_zero_channels_has_the_same_outputs(name: str) -> None:
    model = build_model(name)
    prune_half_of_the_channels(model)
    shape = (3, 16, 16) if name.startswith("resnet") else (28, 28)
    x = torch.randn(5, *shape)
    expected = model(x)
    count = count_parameters(model)
    smaller = remove_zero_channels(model, torch.zeros(1, *shape))
    assert torch.allclose(smaller(x), expected, rtol=0, atol=1e-6 * expected.abs().max().item())
    assert count_parameters(model) == count
    limits = {"resnet18": 0.9, "resnet50": 0.95}  # only channels within a block that are zero after the ReLU
    assert count_parameters(smaller) < limits.get(name, 0.51) * count


def test_a_network_with_all_channels_stays_as_it_is() -> None:
    model = build_model("lenet5")
    smaller = remove_zero_channels(model, torch.zeros(1, 28, 28))
    for parameter, expected in zip(smaller.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, expected)


@torch.no_grad()
def test_every_layer_keeps_a_channel() -> None:
    model = build_model("lenet300")
    for parameter in model[1].parameters():
        parameter.zero_()
    smaller = remove_zero_channels(model, torch.zeros(1, 28, 28))
    assert smaller.get_parameter("fc2.weight").shape == (1, 300)
    x = torch.randn(3, 28, 28)
    assert torch.allclose(smaller(x), model(x))


class Swapped(nn.Sequential):
    """A network that does not apply its layers in the order in which they were added."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self[1](self[0](input.flatten(1)) + input.flatten(1))
        return output


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input) + 1


SHARED = nn.Linear(12, 12)
CUSTOM_NETWORKS = {
    "other order": (Swapped(nn.Linear(144, 144), nn.Linear(144, 5)), 0),
    "custom layer": (nn.Sequential(nn.Flatten(), Doubled(144, 8), nn.Linear(8, 5)), 0),
    "layer applied twice": (nn.Sequential(SHARED, nn.ReLU(), SHARED, nn.Flatten(), nn.Linear(144, 5)), 0),
    "channels in the last axis": (nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)), 0),
    "padded pooling": (
        nn.Sequential(
            nn.Unflatten(1, (1, 12)), nn.Conv2d(1, 4, 3), nn.AvgPool2d(4, 2, 1), nn.Flatten(), nn.Linear(100, 5)
        ),
        0,
    ),
    "dropout": (nn.Sequential(nn.Flatten(), nn.Linear(144, 8), nn.Dropout(0.5), nn.Linear(8, 5)), 4 * 145 + 4 * 5),
}


@pytest.mark.parametrize("name", CUSTOM_NETWORKS)
def test_a_custom_network_keeps_channels_that_cannot_be_removed_safely(name: str) -> None:
    model, removed = CUSTOM_NETWORKS[name]
    model.eval()
    prune_half_of_the_channels(model)
    x = torch.randn(5, 12, 12)
    smaller = remove_zero_channels(model, torch.zeros(1, 12, 12))
    assert torch.allclose(smaller(x), model(x), rtol=0, atol=1e-6)
    assert count_parameters(model) - count_parameters(smaller) == removed
