"""Gradients are averaged over ranks that have used different parameters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from common.techniques.parallel_layout.data_ranks import average_gradients

TIMEOUT = timedelta(seconds=60)
GRADIENTS_BY_RANK = ({"used": [2.0, 4.0]}, {"used": [0.0, 0.0], "used_by_rank_1": [6.0, 8.0, 10.0]})


def average_on_rank(store: dist.Store, rank: int) -> dict[str, list[float] | None]:
    """Train on one of two ranks, and return the averaged gradients by the name of the layer."""
    group = cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, rank, 2, TIMEOUT))
    model = nn.ModuleDict({"used": nn.Linear(2, 1, bias=False), "used_by_rank_1": nn.Linear(3, 1, bias=False)})
    model["unused"] = nn.Linear(1, 1, bias=False)
    model["frozen"] = nn.Linear(4, 1, bias=False).requires_grad_(False)
    for name, inputs in GRADIENTS_BY_RANK[rank].items():
        model[name](torch.tensor(inputs)).backward()  # the gradient of the weight is the input
    average_gradients(model, group)
    gradients = {name.removesuffix(".weight"): parameter.grad for name, parameter in model.named_parameters()}
    return {name: None if gradient is None else gradient.flatten().tolist() for name, gradient in gradients.items()}


def test_a_gradient_that_a_rank_does_not_have_counts_as_zeros() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        gradients_by_rank = list(pool.map(average_on_rank, (store, store), (0, 1)))
    expected = {"used": [1.0, 2.0], "used_by_rank_1": [3.0, 4.0, 5.0], "unused": None, "frozen": None}
    assert gradients_by_rank == [expected, expected]
