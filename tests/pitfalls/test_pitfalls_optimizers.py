"""The mistakes about optimizers of one's own and LARS: what they really do, and what stands here instead."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.training import learning_rate, optimizers
from configs.shared import Optim


class Tutorial(torch.optim.Optimizer):
    """No defaults, a learning rate and momentum of its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {})
        self.lr, self.means = lr, dict[Tensor, Tensor]()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.means.get(p, torch.zeros_like(p))
                self.means[p] = 0.9 * mean + p.grad
                p.sub_(self.lr * self.means[p])


def take_steps(weight: nn.Parameter, optimizer: torch.optim.Optimizer, rates: list[float]) -> Tensor:
    for rate in rates:
        learning_rate.set_learning_rate(optimizer, rate)
        weight.grad = weight.detach().clone()
        optimizer.step()
    return weight.detach().clone()


def test_a_learning_rate_outside_the_groups_is_set_by_no_schedule() -> None:
    weight, other = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    with pytest.raises(KeyError, match="lr"):
        torch.optim.lr_scheduler.StepLR(Tutorial([weight]), 1)
    assert torch.equal(
        take_steps(weight, Tutorial([weight]), [0.1, 0.0, 0.0]), take_steps(other, Tutorial([other]), [0.1] * 3)
    ), "at a rate of 0 it goes on as before"
    sgd = optimizers.build_optimizer([other], Optim())
    assert torch.equal(take_steps(other, sgd, [0.0]), other), "here the rate is in the groups"


def test_momentum_in_an_attribute_is_in_no_checkpoint() -> None:
    def resume(make: Any) -> float:
        """The largest difference after a resume in the middle."""
        weight = nn.Parameter(torch.ones(2, 2))
        optimizer = make([weight])
        take_steps(weight, optimizer, [0.1] * 3)
        resumed, state = nn.Parameter(weight.detach().clone()), copy.deepcopy(optimizer.state_dict())
        again = make([resumed])
        again.load_state_dict(state)
        whole = take_steps(weight, optimizer, [0.1] * 3)
        return float((whole - take_steps(resumed, again, [0.1] * 3)).abs().max())

    assert not Tutorial([nn.Parameter(torch.ones(1))]).state_dict()["state"] and resume(Tutorial) > 0.1
    for name in ("sgd", "adam", "lars", "lamb"):
        assert resume(lambda p, name=name: optimizers.build_optimizer(p, Optim(name=name))) == 0


def test_add_makes_another_tensor_and_add_with_an_underscore_a_step() -> None:
    for method, moves in (("add", False), ("add_", True)):
        weight = nn.Parameter(torch.ones(2, 2))
        with torch.no_grad():
            getattr(weight, method)(torch.ones(2, 2), alpha=-0.1)
        assert bool((weight != 1).any()) is moves


def test_lars_on_biases_keeps_them_where_they_began() -> None:
    """A bias begins at 0, so a step in proportion to it is 0; one of 0.01 moves by less than 1 %."""
    for begin in (0.0, 0.01):
        taken = []
        for on_biases in (True, False):
            bias = nn.Parameter(torch.full((4,), begin))
            scale = 0.001 * bias.norm().item() / 2 if on_biases else 1.0  # the norm of the gradient is 2
            optimizer = optimizers.build_optimizer([bias], Optim(name="lars", momentum=0))
            learning_rate.set_learning_rate(optimizer, 0.1)
            bias.grad = scale * torch.ones(4)
            optimizer.step()
            taken.append((bias - begin).abs().max().item())
        assert taken[0] <= 0.01 * begin and taken[1] == pytest.approx(0.1)
