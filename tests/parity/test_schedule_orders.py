"""The built-in schedules have the same order of actions as those of torch.distributed.pipelining."""

from __future__ import annotations

from typing import Any

import pytest

from common.techniques.pipeline import schedules
from common.techniques.pipeline.schedules import Schedule
from common.techniques.pipeline.torch_engine import MULTI_STAGE_SCHEDULES, read_library_actions
from configs.pipeline import V_SCHEDULES


def make_library_schedule(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> Schedule:
    """Return the order of actions of torch.distributed.pipelining, without the stages that its constructor needs."""
    library_class: Any = MULTI_STAGE_SCHEDULES[name]
    schedule: Any = object.__new__(library_class)
    schedule.pp_group_size = ranks
    schedule.n_local_stages = stages_per_rank
    schedule._n_microbatches = microbatches
    schedule.num_stages = ranks * stages_per_rank
    schedule.microbatches_per_round = microbatches // max(1, microbatches // ranks)
    return [read_library_actions(schedule._calculate_single_rank_operations(rank)) for rank in range(ranks)]


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zero_bubble", "zbv", "dualpipev"])
@pytest.mark.parametrize("ranks, microbatches", [(1, 2), (2, 2), (2, 4), (2, 8), (3, 6), (4, 10), (4, 16), (8, 32)])
def test_the_order_of_actions_is_that_of_torch(name: str, ranks: int, microbatches: int) -> None:
    for stages_per_rank in (2,) if name in V_SCHEDULES else (1, 2, 3):
        stages = ranks * stages_per_rank
        if name == "dualpipev" and microbatches < stages:
            continue
        plan = schedules.SCHEDULES[name](ranks, stages, microbatches)
        assert plan == make_library_schedule(name, ranks, stages_per_rank, microbatches)
