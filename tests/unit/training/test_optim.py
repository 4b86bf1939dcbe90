"""Optimizers are torch's own, without the import of the compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from common.training import optimizers
from configs.shared import Optim
from tests.harness.warm import ROOT


def train(parameters: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    for step in range(5):
        optimizers.set_learning_rate(optimizer, optimizers.compute_learning_rate(Optim(lr=0.1), step, 5, 64))
        optimizer.zero_grad()
        parameters(torch.ones(2, 3)).pow(2).sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in parameters.parameters()]


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_arithmetic_is_that_of_torch(name: str) -> None:
    settings = Optim(name=name, lr=0.1, weight_decay=0.01)  # type: ignore[arg-type]
    theirs = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name]
    extra = {"momentum": 0.9, "nesterov": True} if name == "sgd" else {}
    results, states = [], []
    for make in (
        lambda p: optimizers.build_optimizer(p, settings),
        lambda p: theirs(p, lr=0.1, weight_decay=0.01, **extra),
    ):
        torch.manual_seed(0)
        model = nn.Linear(3, 4)
        optimizer = make(model.parameters())
        results.append(train(model, optimizer))
        states.append(optimizer.state_dict())
    for ours, other in zip(*results, strict=True):
        assert torch.allclose(ours, other, atol=1e-6)
    assert states[0]["state"].keys() == states[1]["state"].keys()
    model = nn.Linear(3, 4)
    restored = optimizers.build_optimizer(model.parameters(), settings)
    restored.load_state_dict(states[1])
    assert restored.state_dict()["param_groups"][0]["lr"] == states[1]["param_groups"][0]["lr"]


def test_training_does_not_import_the_compiler() -> None:
    program = """
import sys, torch
from common.distributed import ddp
from common.training import optimizers
from configs.shared import Optim
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
for name in ("sgd", "adam", "adamw"):
    model = ddp.wrap_ddp(torch.nn.Linear(3, 4), torch.device("cpu"))
    optimizer = optimizers.build_optimizer(model.parameters(), Optim(name=name))
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_warm_up_cosine_and_the_linear_scaling_rule() -> None:
    settings = Optim(lr=0.1, warmup=2, decay="cosine", base_batch=32)
    rates = [optimizers.compute_learning_rate(settings, step, 6, batch=64) for step in range(7)]
    assert rates == pytest.approx([0.1, 0.2, 0.2, 0.2 * (2 + 2**0.5) / 4, 0.1, 0.2 * (2 - 2**0.5) / 4, 0])
    assert optimizers.compute_learning_rate(Optim(lr=0.1, warmup=10), 4, 3, 64) == pytest.approx(0.05), (
        "a run may end before its warm-up"
    )


def test_linear_decay_ends_at_zero() -> None:
    rates = [optimizers.compute_learning_rate(Optim(lr=0.1), step, 4, 64) for step in range(5)]
    assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025, 0])
    assert optimizers.compute_learning_rate(Optim(lr=0.1, decay="constant"), 3, 4, 64) == 0.1


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_is_nesterovs_or_the_classical_one(nesterov: bool) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = optimizers.build_optimizer([weight], Optim(lr=1, momentum=0.5, nesterov=nesterov))
    for _ in range(2):
        weight.grad = torch.ones(1)
        optimizer.step()
    # velocities 1 and 1.5; Nesterov's step is gradient + momentum * velocity
    assert weight.item() == pytest.approx(-(1.5 + 1.75) if nesterov else -(1 + 1.5))
