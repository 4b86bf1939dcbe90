"""Stages of a model: cut at names or balanced, and joined again to the same model."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from common.models.networks import ResNet, SimpleNN
from common.techniques.pipeline import partition


@pytest.fixture
def model() -> SimpleNN:
    return SimpleNN(width=16, depth=5)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6])
def test_stages_in_a_row_are_the_model(model: SimpleNN, count: int) -> None:
    stages = partition.split_into_stages(model, partition.balance_stages(partition.count_parameters(model), count))
    x = torch.randn(3, 28, 28)
    out = x
    for stage in stages:
        out = stage(out)
    assert len(stages) == count
    assert torch.equal(out, model(x))


def test_joined_stages_load_into_the_model_and_back(model: SimpleNN) -> None:
    states = [stage.state_dict() for stage in partition.split_into_stages(model, ["fc2", "fc5"])]
    assert [name for state in states for name in state] == list(model.state_dict())
    other = SimpleNN(width=16, depth=5)
    other.load_state_dict({name: value for state in states for name, value in state.items()})
    for stage, state in zip(partition.split_into_stages(other, ["fc2", "fc5"]), states, strict=True):
        stage.load_state_dict(state)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


def test_balance_finds_the_best_cut() -> None:
    costs = dict(zip("abcdefg", (5, 1, 1, 9, 2, 3, 1), strict=True))
    names, values = list(costs), list(costs.values())
    for count in range(1, 8):
        starts = [0, *(names.index(name) for name in partition.balance_stages(costs, count))]
        found = max(sum(values[a:b]) for a, b in itertools.pairwise([*starts, 7]))
        best = min(
            max(sum(values[a:b]) for a, b in itertools.pairwise([0, *cuts, 7]))
            for cuts in itertools.combinations(range(1, 7), count - 1)
        )
        assert len(starts) == count and found == best
    with pytest.raises(ValueError, match="stages=8 exceeds the 7 layers"):
        partition.balance_stages(costs, 8)


def test_measured_costs_leave_no_trace() -> None:
    model = ResNet("resnet18", (3, 8, 8), 3, width=2).eval()
    before = copy.deepcopy(model.state_dict())
    costs = partition.time_layers(model, torch.randn(4, 3, 8, 8), repeats=2)
    assert list(costs) == [name for name, _ in model.named_children()]
    assert all(cost > 0 for cost in costs.values())
    assert all(p.grad is None for p in model.parameters()) and not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("starts", [["fc9"], ["fc1"], ["fc3", "fc2"], ["fc2", "fc2"]])
def test_wrong_names_are_refused(model: SimpleNN, starts: list[str]) -> None:
    with pytest.raises(ValueError, match="split: "):
        partition.split_into_stages(model, starts)


def test_the_original_size() -> None:
    shapes = [tuple(p.shape) for p in SimpleNN().parameters()]
    assert shapes == [(128, 784), (128,), (64, 128), (64,), (10, 64), (10,)]
    assert sum(p.numel() for p in SimpleNN(width=1024, depth=4).parameters()) > 2_000_000
