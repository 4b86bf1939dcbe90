"""Two ranks that divide an optimizer's state compute the bits of one optimizer, and each state is on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from common.checkpoint import state_dicts
from common.techniques.sharded_optimizer.optimizer_shards import OptimizerShards
from common.training.optimizers import build_optimizer
from configs.shared import OPTIMIZERS, Optim

TIMEOUT = timedelta(seconds=60)
STEPS = 3
Build = Callable[[Sequence[nn.Parameter]], Optimizer]


class EagerMomentum(Optimizer):
    """An optimizer that creates states in its constructor, and for parameters without a gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["momentum"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                if p.grad is not None:
                    momentum.mul_(0.9).add_(p.grad)
                    p.sub_(momentum, alpha=group["lr"])


def build_parameters() -> list[nn.Parameter]:
    """Return parameters of different sizes and types. One is frozen, and one never has a gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 3), (5,), (2, 2), (3, 2), (7,))
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    parameters[2] = nn.Parameter(parameters[2].detach().double())
    parameters[3].requires_grad_(False)
    return parameters


def set_gradients(parameters: Sequence[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters[:3]:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def take_steps(parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> None:
    for step in range(STEPS):
        set_gradients(parameters, step)
        gradients = [parameter.grad for parameter in parameters]
        optimizer.step()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            assert parameter.grad is gradient, "DDP needs the views of its buckets"


def make_optim_builder(name: str) -> Build:
    optim = Optim(name=name, lr=0.1, weight_decay=0.01, decayed="matrices")
    return lambda parameters: build_optimizer(parameters, optim)


def on_two_ranks(function: Callable[[dist.ProcessGroup], Any]) -> list[Any]:
    """Call a function on two ranks, which are threads, and return their results."""
    store = dist.HashStore()

    def call_on_rank(rank: int) -> Any:
        group = dist.ProcessGroupGloo(store, rank, 2, TIMEOUT)
        return function(cast(dist.ProcessGroup, group))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(call_on_rank, (0, 1)))


def list_parameters_with_state(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> list[int]:
    return [number for number, parameter in enumerate(parameters) if parameter in optimizer.state]


def train_divided(build: Build, group: dist.ProcessGroup) -> tuple[list[Tensor], list[int], list[int]]:
    """Take steps with a divided state.

    Return the parameters, and the numbers of those that have a state here, at the end of a step and after training.
    """
    parameters = build_parameters()
    optimizer = build(parameters)
    in_step: list[list[int]] = []

    def record_states(*_: Any) -> None:
        in_step.append(list_parameters_with_state(optimizer, parameters))

    optimizer.register_step_post_hook(record_states)
    OptimizerShards(optimizer, group).start()
    take_steps(parameters, optimizer)
    with_state = list_parameters_with_state(optimizer, parameters)
    values = [parameter.detach() for parameter in parameters]
    return values, in_step[-1], with_state


@pytest.mark.parametrize("name", [*OPTIMIZERS, "EagerMomentum"])
def test_a_divided_state_changes_no_bit(name: str) -> None:
    is_eager = name == "EagerMomentum"
    build = EagerMomentum if is_eager else make_optim_builder(name)
    expected = build_parameters()
    take_steps(expected, build(expected))

    results = on_two_ranks(lambda group: train_divided(build, group))
    for parameters, _, _ in results:
        for parameter, expected_parameter in zip(parameters, expected, strict=True):
            assert torch.equal(parameter, expected_parameter)
    divided = [[0, 2], [1, 3, 4] if is_eager else [1]]
    assert [after_training for _, _, after_training in results] == divided
    if not is_eager:
        assert [in_step for _, in_step, _ in results] == divided, "a step needs no memory for states of other ranks"


def test_states_of_other_ranks_are_dropped_before_the_first_step() -> None:
    """A run may save before its first step, for example after an evaluation that was interrupted."""

    def start(group: dist.ProcessGroup) -> list[int]:
        parameters = build_parameters()
        optimizer = EagerMomentum(parameters)
        OptimizerShards(optimizer, group).start()
        return list_parameters_with_state(optimizer, parameters)

    assert on_two_ranks(start) == [[0, 2], [1, 3, 4]]


def test_only_the_state_of_the_rank_is_loaded() -> None:
    """The states of other ranks do not reach the optimizer, so they need no memory on its device."""
    build = make_optim_builder("adam")
    complete = build_parameters()
    optimizer_of_all = build(complete)
    take_steps(complete, optimizer_of_all)
    saved = state_dicts.collect_optimizer_state(optimizer_of_all, name_parameters(complete))
    assert list(saved) == ["0", "1", "2"]

    def load(group: dist.ProcessGroup) -> list[int]:
        parameters = build_parameters()
        optimizer = build(parameters)
        OptimizerShards(optimizer, group)
        state_dicts.load_optimizer_state(optimizer, name_parameters(parameters), saved)
        loaded = list_parameters_with_state(optimizer, parameters)
        for number in loaded:
            mean = optimizer.state[parameters[number]]["exp_avg"]
            assert torch.equal(mean, saved[str(number)]["exp_avg"])
        return loaded

    assert on_two_ranks(load) == [[0, 2], [1]]


def name_parameters(parameters: Sequence[nn.Parameter]) -> list[tuple[str, Tensor]]:
    return [(str(number), parameter) for number, parameter in enumerate(parameters)]


def test_a_rank_may_have_no_parameters() -> None:
    def train(group: dist.ProcessGroup) -> tuple[Tensor, int]:
        parameter = nn.Parameter(torch.ones(3))
        optimizer = build_optimizer([parameter], Optim(name="adam", lr=0.1))
        OptimizerShards(optimizer, group).start()
        parameter.grad = torch.ones(3)
        optimizer.step()
        return parameter.detach(), len(optimizer.state)

    (first, states_of_rank_0), (second, states_of_rank_1) = on_two_ranks(train)
    assert torch.equal(first, second)
    assert first.max() < 1
    assert states_of_rank_0 == 1
    assert states_of_rank_1 == 0
