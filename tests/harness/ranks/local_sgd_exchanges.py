"""Exchanges of local SGD between two ranks: received vectors, residuals, and bytes sent.

python -m tests.harness.ranks.local_sgd_exchanges [BACKEND]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from common.ranks.rendezvous import World
from common.techniques.local_sgd.exchange import Bf16Exchange, Exchange, Int8Exchange, TopkExchange
from common.techniques.local_sgd.powersgd import PowerSgdExchange
from configs.shared import Launch
from tests.harness.ranks.programs import run_on_ranks

BACKEND: Any = sys.argv[1] if len(sys.argv) > 1 else "auto"
SHAPES = [torch.Size(shape) for shape in ((8, 3, 2), (8,), (20, 8), (2, 1), (5,))]
SIZES = [shape.numel() for shape in SHAPES]
ELEMENTS = sum(SIZES)
WORKERS = 2
ROUNDS = 40
LOW_RANK_ELEMENTS = 3 * (8 + 6) + 3 * (20 + 8)  # of the two matrices that PowerSGD compresses, at rank 3
UNCOMPRESSED_ELEMENTS = 8 + 2 + 5


class ExchangeKind(NamedTuple):
    """A kind of exchange, the bytes of one message, and the allowed error of an element."""

    build: Callable[[Tensor], Exchange]
    message_bytes: int
    tolerance: float


KINDS = {
    "none": ExchangeKind(lambda like: Exchange(like, WORKERS), 4 * ELEMENTS, 1e-6),
    "bf16": ExchangeKind(lambda like: Bf16Exchange(like, WORKERS), 2 * ELEMENTS, 1e-2),
    "int8": ExchangeKind(lambda like: Int8Exchange(like, WORKERS, SIZES), ELEMENTS + 4 * len(SHAPES), 1e-6),
    "topk": ExchangeKind(lambda like: TopkExchange(like, WORKERS, 0.1), 8 * round(0.1 * ELEMENTS), 1e-6),
    "powersgd": ExchangeKind(
        lambda like: PowerSgdExchange(like, WORKERS, SHAPES, 3, 0),
        4 * (LOW_RANK_ELEMENTS + UNCOMPRESSED_ELEMENTS),
        1e-5,
    ),
}


def average_over_workers(vector: Tensor) -> Tensor:
    total = vector.clone()
    dist.all_reduce(total)
    return total / WORKERS


@torch.no_grad()
def exchange_vectors(kind: str, rank: int) -> None:
    """Exchange the same two vectors repeatedly: residuals arrive later, and nothing arrives twice."""
    build, message_bytes, tolerance = KINDS[kind]
    vector = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(rank))
    mean = average_over_workers(vector)
    exchange = build(vector)
    total = torch.zeros(ELEMENTS)
    total_without_residual = torch.zeros(ELEMENTS)
    for _ in range(ROUNDS):
        exchange.begin_exchange(vector)
        received = exchange.finish_exchange()
        total += received
        received_by_ranks = [torch.empty(ELEMENTS) for _ in range(WORKERS)]
        dist.all_gather(received_by_ranks, received)
        for received_by_rank in received_by_ranks:
            assert torch.equal(received, received_by_rank), "ranks would diverge"

        without_residual = build(vector)
        without_residual.begin_exchange(vector)
        total_without_residual += without_residual.finish_exchange()

    assert exchange.bytes_sent == ROUNDS * message_bytes, (kind, exchange.bytes_sent, message_bytes)
    total_with_residual = total.clone()
    if exchange.residual is not None:
        total_with_residual += average_over_workers(exchange.residual)
    assert torch.allclose(total_with_residual, ROUNDS * mean, rtol=0, atol=ROUNDS * tolerance), f"{kind} loses elements"

    error = compute_relative_error(total / ROUNDS, mean)
    assert error < 0.25, (kind, error)
    if kind in ("topk", "powersgd"):
        error_without_residual = compute_relative_error(total_without_residual / ROUNDS, mean)
        assert error < 0.7 * error_without_residual, "residuals must reduce the error"


def compute_relative_error(estimate: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, divided by the norm of the expected vector."""
    return ((estimate - expected).norm() / expected.norm()).item()


@torch.no_grad()
def exchange_thin_matrices(rank: int) -> None:
    """Exchange matrices whose mean has rank 2: two columns represent it."""
    generator = torch.Generator().manual_seed(7)
    left_factor = torch.randn(9, 2, generator=generator)
    right_factor = torch.randn(2, 7, generator=generator)
    vector = (left_factor @ right_factor).flatten() * (1 + rank)
    shapes = [torch.Size((9, 7))]
    exchange = PowerSgdExchange(vector, WORKERS, shapes, 2, 0)
    exchange.begin_exchange(vector)
    assert torch.allclose(exchange.finish_exchange(), average_over_workers(vector), atol=1e-5)
    zeros = torch.zeros(63)
    assert exchange.residual is not None
    assert torch.allclose(average_over_workers(exchange.residual), zeros, atol=1e-5)

    exchange = PowerSgdExchange(zeros, WORKERS, shapes, 2, 0)
    for message in (zeros, zeros, vector):  # messages of zeros must not prevent later ones
        exchange.begin_exchange(message)
        received = exchange.finish_exchange()
    assert received.norm() > 0.1 * vector.norm(), "columns of zeros would remain zeros"


def exchange_all(world: World) -> None:
    for kind in KINDS:
        exchange_vectors(kind, world.rank)
    exchange_thin_matrices(world.rank)


if __name__ == "__main__":
    settings = Launch(device="cpu", backend=BACKEND, setup_timeout=60, step_timeout=60)
    sys.exit(run_on_ranks(exchange_all, WORKERS, settings))
