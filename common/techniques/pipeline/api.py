"""What other techniques use of pipelines: schedules, their executor, the partition into stages, and the report."""

from __future__ import annotations

from common.techniques.pipeline.executor import LossFunction, ScheduleExecutor
from common.techniques.pipeline.partition import balance_stages, split_into_stages
from common.techniques.pipeline.report import PipelineReport
from common.techniques.pipeline.schedules import Action, Schedule, list_stage_ranks, make_schedule

__all__ = [
    "Action",
    "LossFunction",
    "PipelineReport",
    "Schedule",
    "ScheduleExecutor",
    "balance_stages",
    "list_stage_ranks",
    "make_schedule",
    "split_into_stages",
]
