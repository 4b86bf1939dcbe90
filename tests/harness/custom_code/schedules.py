"""A custom pipeline schedule for `schedule=tests/harness/custom_code/schedules.py:last_first`."""

from __future__ import annotations

Plan = list[list[tuple[str, int, int]]]


def last_first(ranks: int, stages: int, microbatches: int) -> Plan:
    """Return a schedule whose backwards start with the last microbatch. Only rank 0 splits them."""
    plan: Plan = []
    for rank in range(ranks):
        kinds = "IW" if rank == 0 else "B"
        actions = [("F", stage, number) for stage in range(rank, stages, ranks) for number in range(microbatches)]
        for stage in reversed(range(rank, stages, ranks)):
            for number in reversed(range(microbatches)):
                actions += [(kind, stage, number) for kind in kinds]
        plan.append(actions)
    return plan
