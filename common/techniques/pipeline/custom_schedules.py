"""Custom pipeline schedules (`schedule=FILE.py:function`) and the check that a schedule is complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.config.config_keys import check_combinations
from common.config.custom_function import convert_errors_of_user_file, load_function
from common.system.errors import UserError
from common.system.text import format_count
from common.techniques.pipeline.schedules import (
    ACTION_NAMES,
    SCHEDULES,
    Action,
    Schedule,
    make_schedule,
    simulate_schedule,
)
from configs.pipeline import SPLIT_BACKWARD_SCHEDULES, PipelineConfig

USAGE = (
    "function(ranks, stages, microbatches) must return, for each rank, a list of tuples (pass, stage, microbatch), "
    "where pass is 'F', 'B', 'I' or 'W'"
)


class HasPipeline(Protocol):
    """Interface of a config with a pipeline."""

    def make_pipeline_config(self) -> PipelineConfig:
        """Return the settings of the pipeline."""


def check_schedule_of_config(settings: HasPipeline) -> None:
    """Raise UserError if the pipeline schedule of a config is invalid, or if other settings do not allow it."""
    pipeline = settings.make_pipeline_config()
    is_unused = pipeline.stages == 1 and pipeline.schedule in SCHEDULES
    if pipeline.engine != "own" or is_unused:
        return
    kinds: set[str] = set()
    for actions in make_schedule(pipeline):
        kinds.update(action.kind for action in actions)
    if "I" in kinds:
        try:
            check_combinations(settings, schedule=SPLIT_BACKWARD_SCHEDULES[0])
        except ValueError as error:
            raise UserError(str(error)) from None


def make_custom_schedule(name: str, sizes: tuple[int, int, int]) -> Schedule:
    """Return the schedule that the custom function `FILE.py:function` defines.

    `sizes` contains the number of ranks, the number of stages, and the number of microbatches. Raises UserError if the
    schedule is invalid.
    """
    ranks, stages, microbatches = sizes
    maker = load_function("schedule", name, ", ".join(SCHEDULES))
    with convert_errors_of_user_file("schedule", name, maker, USAGE):
        plan = []
        for actions in maker(*sizes):
            plan.append([Action(*action) for action in actions])
        check_schedule(plan, [stage % ranks for stage in range(stages)], microbatches)
    return plan


def check_schedule(plan: Schedule, stage_ranks: Sequence[int], microbatches: int) -> None:
    """Raise ValueError unless a schedule trains every microbatch exactly once and cannot deadlock.

    `stage_ranks` contains the rank that holds each stage. The error message names the action.
    """
    ranks = max(stage_ranks) + 1
    if len(plan) != ranks:
        count = format_count(len(plan), "list")
        expected_count = format_count(ranks, "rank")
        raise ValueError(f"a schedule must have one list of actions per rank (got {count} for {expected_count})")
    for rank, actions in enumerate(plan):
        local_stages = [stage for stage, stage_rank in enumerate(stage_ranks) if stage_rank == rank]
        done: set[Action] = set()
        for action in actions:
            is_local = action.kind in tuple(ACTION_NAMES) and action.stage in local_stages
            if not is_local or action.microbatch not in range(microbatches):
                raise ValueError(
                    f"invalid action {tuple(action)} on rank {rank}: the kind must be F, B, I or W, the stage must be "
                    f"one of {local_stages}, and the microbatch must be from 0 to {microbatches - 1}"
                )
            if action.awaited in done:
                raise ValueError(f"rank {rank} executes the {action.awaited} twice")
            done.add(action.awaited)
        check_rank_actions(rank, actions, local_stages, microbatches)
    simulate_schedule(plan, len(stage_ranks))


def check_rank_actions(rank: int, actions: Sequence[Action], local_stages: Sequence[int], microbatches: int) -> None:
    """Raise ValueError unless a rank executes F and B, or F, I and W, of each microbatch in each of its stages."""
    done = set(actions)
    for stage in local_stages:
        for microbatch in range(microbatches):
            forward = Action("F", stage, microbatch)
            backward = Action("B", stage, microbatch)
            input_gradient = Action("I", stage, microbatch)
            weight_gradient = Action("W", stage, microbatch)
            if backward in done and weight_gradient in done:
                raise ValueError(f"rank {rank} executes the {weight_gradient} twice, because B includes W")
            required = [forward, input_gradient, weight_gradient] if input_gradient in done else [forward, backward]
            for action in required:
                if action not in done:
                    raise ValueError(f"rank {rank} never executes the {action}")
