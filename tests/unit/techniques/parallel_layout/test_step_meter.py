"""The counter of sent bytes knows each operation of torch.distributed, or refuses it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from common.techniques.parallel_layout.step_meter import CollectiveCounter


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_operations_of_unknown_size_are_refused() -> None:
    with CollectiveCounter():
        dist.barrier()
        dist.all_reduce(torch.ones(2))
        with pytest.raises(NotImplementedError, match="the bytes that c10d::broadcast_ sends are unknown"):
            dist.broadcast(torch.ones(2), src=0)
