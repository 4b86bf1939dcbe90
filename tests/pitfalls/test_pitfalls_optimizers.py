"""Mistakes with custom optimizers and LARS: what they do, and what this repository does instead."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.training import learning_rate, optimizers
from configs.shared import Optim
from tests.harness.pitfalls.outcomes import collect_outcome


class TutorialSGD(torch.optim.Optimizer):
    """An optimizer without defaults, with learning rate and momentum in attributes."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {})
        self.lr = lr
        self.means: dict[Tensor, Tensor] = {}

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
    weight = nn.Parameter(torch.ones(2, 2))
    other = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(KeyError, match="lr"):
        torch.optim.lr_scheduler.StepLR(TutorialSGD([weight]), 1)
    scheduled = take_steps(weight, TutorialSGD([weight]), [0.1, 0.0, 0.0])
    constant = take_steps(other, TutorialSGD([other]), [0.1] * 3)
    assert torch.equal(scheduled, constant), "a learning rate of 0 in the group has no effect"
    sgd = optimizers.build_optimizer([other], Optim())
    assert torch.equal(take_steps(other, sgd, [0.0]), other)


def test_momentum_in_an_attribute_is_in_no_checkpoint() -> None:
    def measure_difference_after_resume(build: Any) -> float:
        weight = nn.Parameter(torch.ones(2, 2))
        optimizer = build([weight])
        take_steps(weight, optimizer, [0.1] * 3)
        resumed_weight = nn.Parameter(weight.detach().clone())
        resumed_optimizer = build([resumed_weight])
        resumed_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        expected = take_steps(weight, optimizer, [0.1] * 3)
        return float((expected - take_steps(resumed_weight, resumed_optimizer, [0.1] * 3)).abs().max())

    assert not TutorialSGD([nn.Parameter(torch.ones(1))]).state_dict()["state"]
    assert measure_difference_after_resume(TutorialSGD) > 0.1
    for name in ("sgd", "adam", "lars", "lamb"):
        build = functools.partial(optimizers.build_optimizer, cfg=Optim(name=name))
        assert measure_difference_after_resume(build) == 0


def test_add_makes_another_tensor_and_add_with_an_underscore_a_step() -> None:
    for method, moves in (("add", False), ("add_", True)):
        weight = nn.Parameter(torch.ones(2, 2))
        with torch.no_grad():
            getattr(weight, method)(torch.ones(2, 2), alpha=-0.1)
        assert bool((weight != 1).any()) is moves


def test_lars_on_biases_keeps_them_where_they_began() -> None:
    """A bias starts at 0, so a step in proportion to it is 0; a bias of 0.01 changes by less than 1 %."""

    def measure_step(bias: nn.Parameter, gradient_scale: float) -> float:
        before = bias.detach().clone()
        optimizer = optimizers.build_optimizer([bias], Optim(name="lars", momentum=0))
        learning_rate.set_learning_rate(optimizer, 0.1)
        bias.grad = gradient_scale * torch.ones(4)
        optimizer.step()
        return (bias - before).abs().max().item()

    for start in (0.0, 0.01):
        bias = nn.Parameter(torch.full((4,), start))
        lars_scale = 0.001 * bias.norm().item() / 2  # the norm of the gradient is 2
        assert measure_step(bias, lars_scale) <= 0.01 * start
        bias = nn.Parameter(torch.full((4,), start))
        assert measure_step(bias, 1.0) == pytest.approx(0.1)


def test_a_divided_state_that_only_rank_0_saves_is_incomplete() -> None:
    """The layer of the other rank restarts with empty moments. Loading the incomplete checkpoint raises no error."""
    for differences in collect_outcome("optimizer_pitfalls", "divided_state_saved_by_rank_0"):
        assert differences["rank 0"][1] > 0.01
        assert differences["all ranks"] == [0, 0]
