"""Exchanges of local SGD between two ranks: what arrives, what is left over, and how many bytes are sent.

python -m tests.harness.local_sgd_exchanges [BACKEND]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.ranks import local_launcher, rendezvous
from common.ranks.rank_info import RankInfo
from common.techniques.local_sgd.exchange import Bf16Exchange, Exchange, Int8Exchange, TopkExchange
from common.techniques.local_sgd.powersgd import PowerSgdExchange
from configs.shared import Launch

BACKEND: Any = sys.argv[1] if len(sys.argv) > 1 else "auto"
SHAPES = [torch.Size(shape) for shape in ((8, 3, 2), (8,), (20, 8), (2, 1), (5,))]
N, WORKERS, ROUNDS = sum(shape.numel() for shape in SHAPES), 2, 40
MATRICES = 3 * (8 + 6) + 3 * (20 + 8)  # numbers of the two that PowerSGD makes thin, at rank 3
KINDS: dict[str, tuple[Callable[[Tensor], Exchange], int, float]] = {  # with bytes and relative error
    "none": (lambda like: Exchange(like, WORKERS), 4 * N, 1e-6),
    "bf16": (lambda like: Bf16Exchange(like, WORKERS), 2 * N, 1e-2),
    "int8": (lambda like: Int8Exchange(like, WORKERS, [shape.numel() for shape in SHAPES]), N + 4 * len(SHAPES), 1e-6),
    "topk": (lambda like: TopkExchange(like, WORKERS, 0.1), 8 * round(0.1 * N), 1e-6),
    "powersgd": (lambda like: PowerSgdExchange(like, WORKERS, SHAPES, 3, 0), 4 * (MATRICES + 8 + 2 + 5), 1e-5),
}


def average(vector: Tensor) -> Tensor:
    total = vector.clone()
    dist.all_reduce(total)
    return total / WORKERS


@torch.no_grad()
def exchange_vectors(kind: str, rank: int) -> None:
    """The same two vectors again and again: what is left out arrives later, and nothing arrives twice."""
    make, size, error = KINDS[kind]
    vector = torch.randn(N, generator=torch.Generator().manual_seed(rank))
    mean, one = average(vector), make(vector)
    total, lone = torch.zeros(N), torch.zeros(N)
    for _ in range(ROUNDS):
        one.begin_exchange(vector)
        arrived = one.finish_exchange()
        total += arrived
        others = [torch.empty(N) for _ in range(WORKERS)]
        dist.all_gather(others, arrived)
        assert all(torch.equal(arrived, other) for other in others), "ranks would drift apart"
        forgetful = make(vector)
        forgetful.begin_exchange(vector)
        lone += forgetful.finish_exchange()
    assert one.bytes_sent == ROUNDS * size, (kind, one.bytes_sent, size)
    left = average(one.residual) if one.residual is not None else torch.zeros(N)
    assert torch.allclose(total + left, ROUNDS * mean, rtol=0, atol=ROUNDS * error), f"{kind} loses something"
    near = (total / ROUNDS - mean).norm() / mean.norm()
    assert near < 0.25, (kind, near)
    if kind in ("topk", "powersgd"):
        assert near < 0.7 * (lone / ROUNDS - mean).norm() / mean.norm(), "without what is left over it stays away"


@torch.no_grad()
def exchange_thin_matrices(rank: int) -> None:
    """A mean of rank 2 needs no more than two columns."""
    draw = torch.Generator().manual_seed(7)
    vector = torch.cat([torch.randn(9, 2, generator=draw) @ torch.randn(2, 7, generator=draw)]).flatten() * (1 + rank)
    one = PowerSgdExchange(vector, WORKERS, [torch.Size((9, 7))], 2, 0)
    one.begin_exchange(vector)
    assert torch.allclose(one.finish_exchange(), average(vector), atol=1e-5)
    assert one.residual is not None and torch.allclose(average(one.residual), torch.zeros(63), atol=1e-5)
    zero = torch.zeros(63)
    one = PowerSgdExchange(zero, WORKERS, [torch.Size((9, 7))], 2, 0)
    for given in (zero, zero, vector):  # after messages of zeros it can still send
        one.begin_exchange(given)
        arrived = one.finish_exchange()
    assert arrived.norm() > 0.1 * vector.norm(), "columns of zeros would stay zeros"


def body(info: RankInfo) -> None:
    with rendezvous.join_world(info, Launch(device="cpu", backend=BACKEND, setup_timeout=60, step_timeout=60)):
        for kind in KINDS:
            exchange_vectors(kind, info.rank)
        exchange_thin_matrices(info.rank)


if __name__ == "__main__":
    sys.exit(local_launcher.run_ranks(body, WORKERS, 1, lambda: None))
