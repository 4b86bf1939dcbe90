"""Exchanges of local SGD lose nothing, are the same on all ranks, and send as many bytes as their formulas say."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.ranks.ranks import Ranks
from common.system.errors import UserError
from common.techniques.local_sgd.exchange import Exchange
from common.techniques.local_sgd.worker import LocalWorker
from tests.harness import warm
from tests.harness.processes import environment


class Recorded(Exchange):
    """An exchange with nobody else, which keeps what this worker gives to the mean."""

    def average_uncompressed(self, vector: Tensor) -> Tensor:
        self.given = vector.clone()
        return vector.clone()


class World:
    """This worker and one other, which names the moments that it has."""

    def __init__(self, other: list[str]) -> None:
        self.other = other

    def all_gather(self, value: list[str]) -> list[list[str]]:
        return [value, self.other]


@pytest.mark.parametrize("backend", ["gloo", "builtin"])
def test_what_a_message_leaves_out_arrives_later(backend: str) -> None:
    argv = [sys.executable, "-m", "tests.harness.local_sgd_exchanges", *([backend] if backend == "builtin" else [])]
    done = warm.execute(argv, env=environment())
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_what_a_worker_has_no_gradient_of_counts_as_zero(optimizer: Any) -> None:
    """All workers send as many numbers, whichever layers their own samples have used; an all-reduce would hang."""
    used, rest, frozen = nn.Linear(2, 1), nn.Linear(3, 1), nn.Linear(4, 1).requires_grad_(False)
    network = nn.ModuleList([used, rest, frozen])
    own = optimizer(network.parameters(), lr=0.1, **({"momentum": 0.9} if optimizer is torch.optim.SGD else {}))
    exchange = Recorded(torch.zeros(12), 1)
    worker: Any = LocalWorker(network, own, Ranks(World([])), exchange, "averaged")  # type: ignore[arg-type]
    used(torch.ones(1, 2)).sum().backward()
    own.step()
    worker.rebase_onto_reference()
    kinds = 1 if optimizer is torch.optim.SGD else 2  # of moments
    moments = exchange.given.split([number * kinds for number in (2, 1, 3, 1)])
    assert [bool(part.any()) for part in moments] == [True, True, False, False]
    own.step()  # the state of what has had no gradient is as the optimizer left it
    worker.average_gradients()
    assert exchange.given.tolist() == [1, 1, 1, 0, 0, 0, 0]
    assert used.weight.grad is not None and used.weight.grad.tolist() == [[1, 1]]
    assert rest.weight.grad is not None and not rest.weight.grad.any() and frozen.weight.grad is None
    own.step()


def test_a_worker_without_any_gradient_sends_zeros_for_the_moments_of_the_others() -> None:
    """Were it to raise, or send fewer numbers, the others would wait."""
    network = nn.Linear(2, 1)
    own = torch.optim.AdamW(network.parameters())
    exchange = Recorded(torch.zeros(3), 2)
    others = Ranks(World(["exp_avg", "exp_avg_sq"]))  # type: ignore[arg-type]
    worker: Any = LocalWorker(network, own, others, exchange, "averaged")
    worker.rebase_onto_reference()
    assert exchange.given.tolist() == [0] * 6 and not own.state
    worker.ranks = Ranks(World([]))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="AdamW has no momentum in its state; use momentum_of=own"):  # on both
        worker.rebase_onto_reference()
