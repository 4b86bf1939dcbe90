"""Exchanges of local SGD lose nothing, are equal on all ranks, and send as many bytes as their formulas say."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from common.ranks.ranks import Ranks
from common.system.errors import UserError
from common.techniques.local_sgd.exchange import Exchange
from common.techniques.local_sgd.worker import LocalWorker
from tests.harness.ranks.programs import check_program


class RecordingExchange(Exchange):
    """An exchange of a single worker, which records the vector that the worker sends."""

    def average_uncompressed(self, vector: Tensor) -> Tensor:
        self.sent = vector.clone()
        return vector.clone()


class TwoWorkers:
    """A world of this worker and another one, which has moments with the given names."""

    def __init__(self, moments_of_other: list[str]) -> None:
        self.moments_of_other = moments_of_other

    def all_gather(self, moments: list[str]) -> list[list[str]]:
        return [moments, self.moments_of_other]


def make_ranks(*moments_of_other: str) -> Ranks:
    return Ranks(TwoWorkers(list(moments_of_other)))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["builtin"]], ids=["gloo", "builtin"])
def test_entries_that_a_message_omits_are_sent_later(arguments: list[str]) -> None:
    check_program("local_sgd_exchanges", *arguments)


BuildOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def build_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def build_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


@pytest.mark.parametrize("build_optimizer, moment_count", [(build_sgd, 1), (build_adamw, 2)])
def test_parameters_without_a_gradient_count_as_zero(build_optimizer: BuildOptimizer, moment_count: int) -> None:
    """All workers send as many numbers, whichever layers their samples have used. Otherwise an all-reduce hangs."""
    used_layer = nn.Linear(2, 1)
    unused_layer = nn.Linear(3, 1)
    frozen_layer = nn.Linear(4, 1).requires_grad_(False)
    network = nn.ModuleList([used_layer, unused_layer, frozen_layer])
    optimizer = build_optimizer(network.parameters())
    exchange = RecordingExchange(torch.zeros(12), 1)
    worker = LocalWorker(network, optimizer, make_ranks(), exchange, "averaged")
    used_layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    worker.rebase_onto_reference()
    moments = exchange.sent.split([size * moment_count for size in (2, 1, 3, 1)])
    assert [bool(moment.any()) for moment in moments] == [True, True, False, False]

    optimizer.step()  # the state of the unused parameters is as the optimizer created it
    worker.average_gradients()
    assert exchange.sent.tolist() == [1, 1, 1, 0, 0, 0, 0]
    assert used_layer.weight.grad is not None
    assert used_layer.weight.grad.tolist() == [[1, 1]]
    assert unused_layer.weight.grad is not None
    assert not unused_layer.weight.grad.any()
    assert frozen_layer.weight.grad is None
    optimizer.step()


def test_a_worker_without_gradients_sends_zeros_as_its_moments() -> None:
    """If the worker raised an error or sent fewer numbers, the other workers would wait."""
    network = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(network.parameters())
    exchange = RecordingExchange(torch.zeros(3), 2)
    worker = LocalWorker(network, optimizer, make_ranks("exp_avg", "exp_avg_sq"), exchange, "averaged")
    worker.rebase_onto_reference()
    assert exchange.sent.tolist() == [0] * 6
    assert not optimizer.state


def test_an_optimizer_without_moments_on_all_workers_is_refused() -> None:
    network = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(network.parameters())
    worker = LocalWorker(network, optimizer, make_ranks(), RecordingExchange(torch.zeros(3), 2), "averaged")
    with pytest.raises(UserError, match="AdamW has no momentum in its state; use momentum_of=own"):
        worker.rebase_onto_reference()
