"""Optimizers: torch's own without the import of the compiler, LARS and LAMB as in their papers, and learning rates."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from common.training import learning_rate, optimizers
from configs.shared import Optim
from tests.harness.warm import ROOT


def train(parameters: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    for step in range(5):
        learning_rate.set_learning_rate(optimizer, learning_rate.compute_learning_rate(Optim(lr=0.1), step, 5, 64))
        optimizer.zero_grad()
        parameters(torch.ones(2, 3)).pow(2).sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in parameters.parameters()]


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_arithmetic_is_that_of_torch(name: str) -> None:
    settings = Optim(name=name, lr=0.1, weight_decay=0.01)
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
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_warm_up_cosine_and_the_linear_scaling_rule() -> None:
    settings = Optim(lr=0.1, warmup=2, decay="cosine", base_batch=32)
    rates = [learning_rate.compute_learning_rate(settings, step, 6, batch=64) for step in range(7)]
    assert rates == pytest.approx([0.1, 0.2, 0.2, 0.2 * (2 + 2**0.5) / 4, 0.1, 0.2 * (2 - 2**0.5) / 4, 0])
    assert learning_rate.compute_learning_rate(Optim(lr=0.1, warmup=10), 4, 3, 64) == pytest.approx(0.05), (
        "a run may end before its warm-up"
    )


def test_linear_decay_ends_at_zero() -> None:
    rates = [learning_rate.compute_learning_rate(Optim(lr=0.1), step, 4, 64) for step in range(5)]
    assert rates == pytest.approx([0.1, 0.075, 0.05, 0.025, 0])
    assert learning_rate.compute_learning_rate(Optim(lr=0.1, decay="constant"), 3, 4, 64) == 0.1


def test_decay_in_steps_is_a_tenth_after_half_and_a_hundredth_after_three_quarters() -> None:
    settings = Optim(lr=1, warmup=2, decay="step")
    rates = [learning_rate.compute_learning_rate(settings, step, 10, 64) for step in range(10)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_is_nesterovs_or_the_classical_one(nesterov: bool) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = optimizers.build_optimizer([weight], Optim(lr=1, momentum=0.5, nesterov=nesterov))
    for _ in range(2):
        weight.grad = torch.ones(1)
        optimizer.step()
    # velocities 1 and 1.5; Nesterov's step is gradient + momentum * velocity
    assert weight.item() == pytest.approx(-(1.5 + 1.75) if nesterov else -(1 + 1.5))


def lars_of_the_paper(w: np.ndarray, gradients: list[np.ndarray], rates: list[float], decay: float) -> np.ndarray:
    """Algorithm 1 of arXiv 1708.03888, momentum 0.9, LARS coefficient 0.001."""
    v = np.zeros_like(w)
    for g, rate in zip(gradients, rates, strict=True):
        local = 1.0 if w.ndim < 2 else 0.001 * np.linalg.norm(w) / (np.linalg.norm(g) + decay * np.linalg.norm(w))
        v = 0.9 * v + rate * local * (g + decay * w)
        w = w - v
    return w


def lamb_of_the_paper(w: np.ndarray, gradients: list[np.ndarray], rates: list[float], decay: float) -> np.ndarray:
    """Algorithm 2 of arXiv 1904.00962 with its usual constants."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        r = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6) + decay * w
        w = w - rate * (1.0 if w.ndim < 2 else np.linalg.norm(w) / np.linalg.norm(r)) * r
    return w


@pytest.mark.parametrize(("name", "reference"), [("lars", lars_of_the_paper), ("lamb", lamb_of_the_paper)])
@pytest.mark.parametrize(("decay", "decayed"), [(0.0, "all"), (0.03, "all"), (0.03, "matrices")])
def test_lars_and_lamb_are_those_of_their_papers(name: str, reference: Any, decay: float, decayed: Any) -> None:
    rates = [0.5, 1.0, 0.25, 0.1]
    weights = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((4, 3), (3, 2, 5, 5), (4,))]
    start, gradients = (
        [w.detach().numpy().copy() for w in weights],
        [[torch.randn_like(w) for w in weights] for _ in rates],
    )
    settings = Optim(name=name, lr=7, weight_decay=decay, decayed=decayed)
    optimizer = optimizers.build_optimizer(weights, settings)
    for rate, now in zip(rates, gradients, strict=True):
        learning_rate.set_learning_rate(optimizer, rate)
        for w, gradient in zip(weights, now, strict=True):
            w.grad = gradient
        optimizer.step()
    for number, (w, first) in enumerate(zip(weights, start, strict=True)):
        own = 0.0 if decayed == "matrices" and w.ndim < 2 else decay
        expected = reference(first, [now[number].numpy() for now in gradients], rates, own)
        assert np.abs(w.detach().numpy() - expected).max() < 1e-12 < np.abs(expected - first).max()


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_weights_of_zero_move_by_the_step_as_it_is(name: str) -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    optimizer = optimizers.build_optimizer([weight], Optim(name=name, lr=0.1))
    for gradient in (torch.zeros(2, 2), torch.ones(2, 2)):  # 0 by 0 is no number
        weight.grad = gradient
        optimizer.step()
    assert weight.isfinite().all() and (weight < 0).all()


def test_biases_and_scales_have_no_weight_decay_where_matrices_alone_have_it() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Conv2d(1, 1, 1))
    for decayed, gone in (("all", []), ("matrices", [0.0] * 4)):
        optimizer = optimizers.build_optimizer(layers.parameters(), Optim(weight_decay=0.1, decayed=decayed))  # type: ignore[arg-type]
        held = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
        assert [held[id(p)] for p in layers.parameters() if p.ndim > 1] == [0.1] * 2
        assert [held[id(p)] for p in layers.parameters() if p.ndim < 2] == (gone or [0.1] * 4)
