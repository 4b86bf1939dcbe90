"""Partition of a model into stages, at given layers or balanced."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from common.models.networks import ResNet, SimpleNN
from common.techniques.pipeline import partition


@pytest.fixture
def model() -> SimpleNN:
    return SimpleNN(width=16, depth=5)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_stages_in_sequence_compute_the_output_of_the_model(model: SimpleNN, count: int) -> None:
    starts = partition.balance_stages(partition.count_parameters(model), count)
    stages = partition.split_into_stages(model, starts)
    assert len(stages) == count
    images = torch.randn(3, 28, 28)
    activation = images
    for stage in stages:
        activation = stage(activation)
    assert torch.equal(activation, model(images))


def test_states_of_stages_form_the_state_of_the_model(model: SimpleNN) -> None:
    starts = ["fc2", "fc5"]
    states = [stage.state_dict() for stage in partition.split_into_stages(model, starts)]
    joined: dict[str, Tensor] = {}
    for state in states:
        joined |= state
    assert sum(map(len, states)) == len(joined), "stages have no tensor in common"
    assert list(joined) == list(model.state_dict())

    loaded = SimpleNN(width=16, depth=5)
    loaded.load_state_dict(joined)
    for stage, state in zip(partition.split_into_stages(loaded, starts), states, strict=True):
        stage.load_state_dict(state)
    assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)


def compute_largest_cost(costs: list[int], starts: Iterable[int]) -> int:
    """Return the cost of the most expensive stage. `starts` has the first layer of each stage but the first."""
    bounds = [0, *starts, len(costs)]
    return max(sum(costs[start:end]) for start, end in itertools.pairwise(bounds))


@pytest.mark.parametrize("count", range(1, 8))
def test_balanced_stages_minimize_the_largest_cost(count: int) -> None:
    names = "abcdefg"
    costs = [5, 1, 1, 9, 2, 3, 1]
    balanced_starts = partition.balance_stages(dict(zip(names, costs, strict=True)), count)
    assert len(balanced_starts) == count - 1

    possible_starts = itertools.combinations(range(1, 7), count - 1)
    minimum = min(compute_largest_cost(costs, starts) for starts in possible_starts)
    assert compute_largest_cost(costs, map(names.index, balanced_starts)) == minimum


def test_every_stage_has_a_layer_with_parameters() -> None:
    costs = {"flatten": 0.0, "first": 90.0, "second": 5.0, "third": 5.0, "fourth": 1.0}
    assert partition.balance_stages(costs, 4) == ["second", "third", "fourth"]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="stages=8 exceeds the 7 layers"):
        partition.balance_stages(dict.fromkeys("abcdefg", 1.0), 8)


def test_measuring_costs_does_not_change_the_model() -> None:
    model = ResNet("resnet18", (3, 8, 8), 3, width=2).eval()
    before = copy.deepcopy(model.state_dict())
    costs = partition.time_layers(model, torch.randn(4, 3, 8, 8), repeats=2)
    assert list(costs) == [name for name, _ in model.named_children()]
    assert all(cost > 0 for cost in costs.values())

    assert all(p.grad is None for p in model.parameters())
    assert not model.training
    assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("starts", [["fc9"], ["fc1"], ["fc3", "fc2"], ["fc2", "fc2"]])
def test_invalid_starts_of_stages_are_refused(model: SimpleNN, starts: list[str]) -> None:
    with pytest.raises(ValueError, match="split: "):
        partition.split_into_stages(model, starts)
