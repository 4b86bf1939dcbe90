"""The two parts of a split backward: the gradient of the input, and then those of the weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from common.techniques.pipeline.split_backward import compute_input_gradient, find_dependent_nodes


class TiedLayers(nn.Module):
    """A layer that is used twice, between two other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.tied = nn.Linear(5, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tied(self.first(x).relu()).tanh()
        output: Tensor = self.last(self.tied(hidden))
        return output


class Residual(nn.Module):
    """Convolutions with BatchNorm and a shortcut. An input of the last layer has two consumers."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 2, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1, 2, 2, 2)
        images = x.new_zeros(len(x), 8).index_copy(1, torch.arange(5), x).view(shape)
        hidden = self.norm(self.convolution(images)).relu_() + self.scale * images
        left, right = hidden.chunk(2, 1)
        output: Tensor = self.last(torch.cat([right, left.exp()], 1).flatten(1))
        return output


def build_embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 5), nn.ReLU(), nn.Linear(5, 3))


def list_gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("build", [TiedLayers, Residual, build_embedding])
@pytest.mark.parametrize("is_wanted", [False, True])
def test_both_parts_together_are_the_whole_backward(build: Callable[[], nn.Module], is_wanted: bool) -> None:
    torch.manual_seed(0)
    model = build().double()
    is_embedding = build is build_embedding
    x = torch.arange(4) if is_embedding else torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(4, 3, dtype=torch.float64)
    torch.autograd.backward(model(x), gradient)
    expected = list_gradients(model)
    expected_input_gradient = x.grad
    model.zero_grad()

    input_gradient, remaining = compute_input_gradient(x, model(x), gradient, is_wanted=is_wanted and not is_embedding)
    tied = {parameter for name, parameter in model.named_parameters() if name.startswith("tied")}
    for parameter in model.parameters():
        assert (parameter.grad is not None) == (parameter in tied)
    for part in remaining:
        part.accumulate()

    for actual, expected_gradient in zip(list_gradients(model), expected, strict=True):
        assert actual is not None
        assert expected_gradient is not None
        assert torch.allclose(actual, expected_gradient, rtol=0, atol=1e-14)
    if is_wanted and not is_embedding:
        assert input_gradient is not None
        assert expected_input_gradient is not None
        assert torch.allclose(input_gradient, expected_input_gradient, rtol=0, atol=1e-14)
    else:
        assert input_gradient is None


def test_the_second_part_computes_no_gradients_of_activations() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    x = torch.randn(4, 5, requires_grad=True)
    activations: list[Tensor] = []
    model[1].register_forward_hook(lambda layer, args, output: activations.append(output))
    output = model(x)
    calls: list[Tensor] = []
    activations[0].register_hook(calls.append)
    _, remaining = compute_input_gradient(x, output, torch.ones(4, 3), is_wanted=True)
    assert len(calls) == 1
    for part in remaining:
        part.accumulate()
    assert len(calls) == 1


def test_a_stage_without_parameters_has_only_a_gradient_of_its_input() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    gradient, remaining = compute_input_gradient(x, x.exp(), torch.ones(4, 5), is_wanted=True)
    assert gradient is not None
    assert torch.equal(gradient, x.exp())
    assert remaining == []
    assert compute_input_gradient(x, x.exp(), torch.ones(4, 5), is_wanted=False) == (None, [])
    assert compute_input_gradient(x.detach(), x.detach().exp(), None, is_wanted=False) == (None, [])


def list_node_names(model: nn.Module) -> list[str]:
    x = torch.randn(4, 5, requires_grad=True)
    edge = get_gradient_edge(model(x))
    input_edge = get_gradient_edge(x)
    nodes = find_dependent_nodes(edge.node, input_edge.node)
    return [node.name() for node in nodes]


def test_the_order_of_the_nodes_depends_only_on_the_graph() -> None:
    """Ranks whose gradients of parameters communicate need the same order."""
    model = TiedLayers()
    names = list_node_names(model)
    assert names[0] == "AddmmBackward0"
    assert len(set(names)) > 2
    for _ in range(20):
        assert list_node_names(model) == names
