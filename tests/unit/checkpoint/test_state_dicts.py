"""State of models, optimizers and random generators: resumed to the bit, refused if it does not fit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from common.checkpoint import state_dicts
from common.checkpoint.checkpointer import CheckpointState
from common.system.errors import UserError
from common.training.optimizers import build_optimizer
from configs.shared import Optim
from tests.unit.checkpoint.conftest import RunWithCheckpoints


def build_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def train_three_steps(model: nn.Module, optimizer: Optimizer) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.rand(4, 3)).pow(2).mean().backward()
        optimizer.step()


def list_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "lars", "lamb"])
def test_a_resumed_optimizer_computes_the_same_bits(run: RunWithCheckpoints, name: Any) -> None:
    settings = Optim(name=name, lr=0.01, weight_decay=0.01)
    model = build_model(seed=1)
    optimizer = build_optimizer(model.parameters(), settings)
    train_three_steps(model, optimizer)
    state = CheckpointState(
        state_dicts.gather_full_tensors(list_tensors(model)),
        state_dicts.collect_optimizer_state(optimizer, model.named_parameters()),
        {},
        {"random": state_dicts.capture_rng_state()},
    )
    run.checkpointer.save(3, state)
    train_three_steps(model, optimizer)

    resumed_model = build_model(seed=2)
    resumed_optimizer = build_optimizer(resumed_model.parameters(), settings)
    loaded = run.load_checkpoint()
    assert loaded.local is not None
    state_dicts.load_tensors(list_tensors(resumed_model), loaded.model)
    state_dicts.load_optimizer_state(resumed_optimizer, resumed_model.named_parameters(), loaded.optimizer)
    state_dicts.restore_rng_state(loaded.local["random"])
    train_three_steps(resumed_model, resumed_optimizer)
    resumed_tensors = resumed_model.state_dict()
    assert resumed_tensors.keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, resumed_tensors[key]), key
        assert tensor.isfinite().all(), key


def test_the_data_types_of_the_optimizer_state_are_restored() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    saved = {"weight": {"master": torch.full((3,), 1 / 3, dtype=torch.float64), "count": torch.tensor(2**40)}}
    state_dicts.load_optimizer_state(optimizer, [("weight", parameter)], saved)
    state = optimizer.state[parameter]
    for key, value in saved["weight"].items():
        assert state[key].dtype == value.dtype
        assert torch.equal(state[key], value)


def test_a_pipeline_stage_loads_its_part_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = build_optimizer(model.parameters(), Optim())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    tensors = state_dicts.gather_full_tensors(model.named_parameters())
    optimizer_state = state_dicts.collect_optimizer_state(optimizer, model.named_parameters())

    stage = nn.Linear(2, 2)
    stage_optimizer = build_optimizer(stage.parameters(), Optim())
    stage_parameters = [(f"1.{name}", parameter) for name, parameter in stage.named_parameters()]
    state_dicts.load_tensors(stage_parameters, tensors)
    state_dicts.load_optimizer_state(stage_optimizer, stage_parameters, optimizer_state)
    weight = model.get_parameter("1.weight")
    assert torch.equal(stage.weight, weight)
    momentum = optimizer.state[weight]["momentum_buffer"]
    stage_momentum = stage_optimizer.state[stage.weight]["momentum_buffer"]
    assert torch.equal(stage_momentum, momentum)
    assert stage_momentum.data_ptr() != momentum.data_ptr()


@pytest.mark.parametrize(
    "module, message", [(nn.Linear(2, 3), "shape"), (nn.BatchNorm1d(2), "has no tensor running_mean")]
)
def test_the_state_of_another_model_is_refused(module: nn.Module, message: str) -> None:
    tensors = state_dicts.gather_full_tensors(nn.Linear(2, 2).named_parameters())
    with pytest.raises(UserError, match=message):
        state_dicts.load_tensors([*module.named_buffers(), *module.named_parameters()], tensors)


def draw_random_numbers() -> list[Any]:
    """Draw numbers from each random generator; NumPy and Python keep the second number of a Gaussian pair."""
    python_numbers = [random.random(), random.gauss()]
    return [torch.rand(3).tolist(), np.random.rand(3).tolist(), np.random.randn(1).tolist(), python_numbers]


def test_restored_random_generators_repeat_their_numbers() -> None:
    draw_random_numbers()
    state = state_dicts.capture_rng_state()
    first_numbers = draw_random_numbers()
    second_numbers = draw_random_numbers()
    for first, second in zip(first_numbers, second_numbers, strict=True):
        assert first != second
    state_dicts.restore_rng_state(state)
    assert draw_random_numbers() == first_numbers


class SimulatedGpus:
    """Random states of several GPUs, in place of those of torch.cuda."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, current: int) -> None:
        self.states = [torch.tensor([gpu], dtype=torch.uint8) for gpu in range(count)]
        functions = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: count,
            "current_device": lambda: current,
            "get_rng_state": lambda gpu=current: self.states[gpu],
            "set_rng_state": lambda state, gpu=current: self.states.__setitem__(gpu, state),
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def list_values(self) -> list[int]:
        return [int(state) for state in self.states]


def test_the_random_states_of_all_gpus_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = SimulatedGpus(monkeypatch, count=3, current=1)
    state = state_dicts.capture_rng_state()
    gpus.states = [torch.zeros(1, dtype=torch.uint8)] * 3
    state_dicts.restore_rng_state(state)
    assert gpus.list_values() == [0, 1, 2]

    # on another host, the same rank may use another GPU, and fewer GPUs may be visible
    gpus = SimulatedGpus(monkeypatch, count=1, current=0)
    state_dicts.restore_rng_state(state)
    assert gpus.list_values() == [1]


def test_the_random_state_of_one_gpu_is_restored_from_an_older_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = SimulatedGpus(monkeypatch, count=2, current=1)
    state = state_dicts.capture_rng_state() | {"cuda": torch.tensor([7], dtype=torch.uint8)}
    state_dicts.restore_rng_state(state)
    assert gpus.list_values() == [0, 7]


class Wrapper(nn.Module):
    """A network whose only child has the name that wrappers of PyTorch use."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


def test_names_of_a_network_with_the_child_module_are_kept() -> None:
    model = Wrapper()
    tensors = state_dicts.gather_full_tensors(model.named_parameters())
    loaded = Wrapper()
    state_dicts.load_tensors(loaded.named_parameters(), tensors)
    assert torch.equal(loaded.module.weight, model.module.weight)
    state_dicts.load_tensors(model.module.named_parameters(), tensors)
