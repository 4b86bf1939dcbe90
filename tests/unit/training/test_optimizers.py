"""Optimizers: torch's own without the import of the compiler, momentum, and weight decay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from common.training import learning_rate, optimizers
from configs.shared import Optim
from tests.harness.commands.programs import run_program


def train(model: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    """Train for five steps with a learning rate that decays."""
    for step in range(5):
        rate = learning_rate.compute_learning_rate(Optim(lr=0.1), step, 5, 64)
        learning_rate.set_learning_rate(optimizer, rate)
        optimizer.zero_grad()
        model(torch.ones(2, 3)).pow(2).sum().backward()
        optimizer.step()


def build_torch_optimizer(name: str, model: nn.Linear) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01, momentum=0.9, nesterov=True)
    optimizer_class = torch.optim.Adam if name == "adam" else torch.optim.AdamW
    return optimizer_class(model.parameters(), lr=0.1, weight_decay=0.01)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_parameters_and_state_are_those_of_torch(name: str) -> None:
    settings = Optim(name=name, lr=0.1, weight_decay=0.01)
    model = nn.Linear(3, 4)
    torch_model = nn.Linear(3, 4)
    torch_model.load_state_dict(model.state_dict())
    optimizer = optimizers.build_optimizer(model.parameters(), settings)
    torch_optimizer = build_torch_optimizer(name, torch_model)
    train(model, optimizer)
    train(torch_model, torch_optimizer)
    for parameter, torch_parameter in zip(model.parameters(), torch_model.parameters(), strict=True):
        assert torch.allclose(parameter, torch_parameter, atol=1e-6)
    torch_state = torch_optimizer.state_dict()
    assert optimizer.state_dict()["state"].keys() == torch_state["state"].keys()

    restored = optimizers.build_optimizer(nn.Linear(3, 4).parameters(), settings)
    restored.load_state_dict(torch_state)
    assert restored.state_dict()["param_groups"][0]["lr"] == torch_state["param_groups"][0]["lr"]


@pytest.mark.slow
def test_training_does_not_import_the_compiler() -> None:
    program = """
import sys, torch
from common.techniques.data_parallel import ddp
from common.training import optimizers
from configs.shared import Optim
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
for name in ("sgd", "adam", "adamw", "lars", "lamb"):
    model = ddp.wrap_ddp(torch.nn.Linear(3, 4), torch.device("cpu"))
    optimizer = optimizers.build_optimizer(model.parameters(), Optim(name=name))
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
print("torch._dynamo" in sys.modules)
"""
    assert run_program(program) == "False\n"


@pytest.mark.parametrize("nesterov, weight_after_two_steps", [(True, -(1.5 + 1.75)), (False, -(1 + 1.5))])
def test_momentum_is_nesterovs_or_the_classical_one(nesterov: bool, weight_after_two_steps: float) -> None:
    """The velocities are 1 and 1.5. Nesterov's step is gradient + momentum * velocity."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = optimizers.build_optimizer([weight], Optim(lr=1, momentum=0.5, nesterov=nesterov))
    for _ in range(2):
        weight.grad = torch.ones(1)
        optimizer.step()
    assert weight.item() == pytest.approx(weight_after_two_steps)


@pytest.mark.parametrize(
    "settings, vector_decay",
    [(Optim(weight_decay=0.1, decayed="all"), 0.1), (Optim(weight_decay=0.1, decayed="matrices"), 0.0)],
)
def test_biases_and_scales_have_no_weight_decay_if_only_matrices_have_it(settings: Optim, vector_decay: float) -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Conv2d(1, 1, 1))
    optimizer = optimizers.build_optimizer(layers.parameters(), settings)
    decays_of_matrices: list[float] = []
    decays_of_vectors: list[float] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            decays = decays_of_matrices if parameter.ndim > 1 else decays_of_vectors
            decays.append(group["weight_decay"])
    assert decays_of_matrices == [0.1] * 2
    assert decays_of_vectors == [vector_decay] * 4
