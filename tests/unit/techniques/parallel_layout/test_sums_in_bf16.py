"""Tensors of type bfloat16 are added in float32."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from common.techniques.parallel_layout.tensor_ranks import all_reduce, reduce_scatter_tokens

RANKS = 3
TIMEOUT = timedelta(seconds=60)


def add_on_rank(store: dist.Store, rank: int) -> tuple[Tensor, Tensor]:
    """Return the sum over three ranks, and this rank's part of the sum."""
    group = cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, rank, RANKS, TIMEOUT))
    x = torch.ones(1, RANKS, 1, dtype=torch.bfloat16)
    x[0, rank] = 256
    return all_reduce(x, group), reduce_scatter_tokens(x, group)


def test_sums_over_ranks_are_rounded_once() -> None:
    """In bfloat16, 256 + 1 is 256, so that some of the sums 256 + 1 + 1 would be 256."""
    store = dist.HashStore()
    with ThreadPoolExecutor(RANKS) as pool:
        sums_by_rank = list(pool.map(add_on_rank, [store] * RANKS, range(RANKS)))
    for total, part in sums_by_rank:
        assert total.dtype == part.dtype == torch.bfloat16
        assert total.flatten().tolist() == [258, 258, 258]
        assert part.flatten().tolist() == [258]
