"""Collectives on vectors of whole numbers: what each rank puts in, what must come out, bandwidths and bytes.

Every operation takes an input and has an output, as in nccl-tests (github.com/NVIDIA/nccl-tests), whose sizes and
bandwidths these are: doc/PERFORMANCE.md there. Of n elements and p ranks, shapes are

    operation         input    output                                           result is in
    sendrecv          [n]      [n], what the rank before in the ring has put in    the output
    broadcast         [n]      -                                                   the input, of rank 0
    all_reduce        [n]      -                                                   the input
    reduce_scatter    [n]      [n / p]                                             the output
    all_gather        [n / p]  [n]                                                 the output
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from common.distributed.rank_info import RankInfo

Call = Callable[[Tensor, Tensor], object]
"""An operation on the input and the output of this rank."""
PERIOD = 1009  # elements after which the numbers of a rank repeat: a prime, so that no chunk looks like its neighbour
EXACT = 256  # largest sum: bfloat16, of all types the shortest, has all whole numbers up to it
SHARDED = ("reduce_scatter", "all_gather")
IN_PLACE = ("broadcast", "all_reduce")


class Point(NamedTuple):
    """An operation on a vector of `length` elements, nbytes bytes in all."""

    op: str
    dtype: str
    length: int
    nbytes: int

    @property
    def name(self) -> str:
        """Operation and type, without the size."""
        return f"{self.op} {self.dtype}"


def list_points(ops: Sequence[str], dtypes: Sequence[str], sizes: Sequence[int], ranks: int) -> list[Point]:
    """Return every operation with every type in every size (bytes), rounded up to what can be shared by the ranks."""
    points = []
    for op, dtype, size in itertools.product(ops, dtypes, sizes):
        width = getattr(torch, dtype).itemsize
        least = width * (ranks if op in SHARDED else 1)
        nbytes = -(-size // least) * least
        points.append(Point(op, dtype, nbytes // width, nbytes))
    return points


def compute_bus_factor(op: str, ranks: int) -> float:
    """Return bus bandwidth / algorithm bandwidth: the bytes that must pass through a rank's link, for each of a vector.

    Whatever the number of ranks, a bus bandwidth can be compared with that of the link.
    """
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if op in SHARDED else 1.0


def compute_least_bytes(point: Point, ranks: int) -> float:
    """Return the bytes that a rank must send on average; in a ring every rank sends as many.

    The least that is possible: Patarasuk and Yuan 2009 (doi:10.1016/j.jpdc.2008.09.002).
    """
    factor = (ranks - 1) / ranks if point.op == "broadcast" else compute_bus_factor(point.op, ranks)
    return factor * point.nbytes


class Vectors:
    """Inputs of a rank, drawn from a seed, and the results that it must get: sums that every type holds exactly."""

    def __init__(self, seed: int, rank_info: RankInfo, device: torch.device) -> None:
        self.rank, self.ranks, self.device = rank_info.rank, rank_info.size, device
        most = max(1, min(9, EXACT // self.ranks))
        draw = torch.Generator().manual_seed(seed)
        self.periods = torch.randint(most + 1, (self.ranks, PERIOD), generator=draw).to(device)

    def repeat(self, period: Tensor, point: Point, count: int) -> Tensor:
        """Return `count` elements of the point's type: the numbers of the period, again and again."""
        return period.to(getattr(torch, point.dtype)).repeat(-(-count // PERIOD))[:count]

    def fill(self, point: Point) -> tuple[Tensor, Tensor]:
        """Return this rank's input, and an output that holds nothing right yet."""
        shard = point.length // self.ranks
        x = self.repeat(self.periods[self.rank], point, shard if point.op == "all_gather" else point.length)
        length = {"reduce_scatter": shard, "broadcast": 0, "all_reduce": 0}.get(point.op, point.length)
        return x, torch.full((length,), -1, dtype=x.dtype, device=self.device)

    def compute_expected(self, point: Point) -> Tensor:
        """Return what this rank must get."""
        shard = point.length // self.ranks
        match point.op:
            case "sendrecv":
                return self.repeat(self.periods[self.rank - 1], point, point.length)
            case "broadcast":
                return self.repeat(self.periods[0], point, point.length)
            case "all_gather":
                return torch.cat([self.repeat(period, point, shard) for period in self.periods])
        total = self.repeat(self.periods.sum(0), point, point.length)
        return total[shard * self.rank : shard * (self.rank + 1)] if point.op == "reduce_scatter" else total

    def check(self, point: Point, x: Tensor, out: Tensor, side: str) -> None:
        """Raise RuntimeError unless the result, in input or output, is exactly right."""
        found, expected = x if point.op in IN_PLACE else out, self.compute_expected(point)
        if not torch.equal(found, expected):
            where = int((found != expected).nonzero()[0])
            raise RuntimeError(
                f"{side} is wrong: {point.op} of {point.length} {point.dtype} gives rank {self.rank} "
                f"{found[where].item():g} at position {where}, and {expected[where].item():g} is right"
            )
