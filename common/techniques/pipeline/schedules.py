"""Pipeline schedules as data: an ordered list of actions for each rank. This module does not import torch.

An action is (kind, stage, microbatch). The kind is F (forward) or B (backward). A schedule may split a backward into I
(gradient of the input) and W (gradient of the weights), because only I delays other ranks. A schedule does not contain
messages, because they can be derived from the actions. It also determines which rank holds a stage: the rank that
executes the stage's actions.

GPipe is described by Huang et al. 2019 (arXiv 1811.06965). `interleaved_schedules` and `v_schedules` contain the other
schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from common.config.lookup import import_object
from configs.pipeline import PipelineConfig

ACTION_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


class Action(NamedTuple):
    """A unit of work: one microbatch in one stage.

    The kind is F (forward) or B (backward), or one half of a backward: I (gradient of the input) or W (gradient of the
    weights).
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{ACTION_NAMES[self.kind]} of microbatch {self.microbatch} on stage {self.stage}"

    @property
    def awaited(self) -> Action:
        """The action by which other actions refer to this one: B instead of I, which yields the same gradient."""
        return self._replace(kind="B") if self.kind == "I" else self


Schedule = list[list[Action]]
Maker = Callable[[int, int, int], Schedule]


def list_local_stages(rank: int, ranks: int, stages: int) -> list[int]:
    """Return the stages of a rank: every `ranks`-th stage, starting with stage `rank`.

    Each microbatch therefore visits all ranks in turn.
    """
    return list(range(rank, stages, ranks))


def make_naive_schedule(ranks: int, stages: int, microbatches: int) -> Schedule:
    """Return the naive schedule, in which stages do not overlap.

    Each microbatch passes through all stages, forward and backward, before the next microbatch starts.
    """
    plan: Schedule = []
    for single_actions in make_gpipe_schedule(ranks, stages, 1):
        actions = []
        for microbatch in range(microbatches):
            actions += [action._replace(microbatch=microbatch) for action in single_actions]
        plan.append(actions)
    return plan


def make_gpipe_schedule(ranks: int, stages: int, microbatches: int) -> Schedule:
    """Return the schedule of GPipe, in which all forwards precede all backwards.

    The activations of all microbatches must be stored at the same time.
    """
    plan: Schedule = []
    for rank in range(ranks):
        local_stages = list_local_stages(rank, ranks, stages)
        actions = []
        for stage in local_stages:
            actions += [Action("F", stage, microbatch) for microbatch in range(microbatches)]
        for stage in reversed(local_stages):
            actions += [Action("B", stage, microbatch) for microbatch in range(microbatches)]
        plan.append(actions)
    return plan


def import_when_called(path: str) -> Maker:
    """Return a function that imports the function `module:name` of this package when it is called."""

    def make_schedule_of_module(ranks: int, stages: int, microbatches: int) -> Schedule:
        maker: Maker = import_object(f"common.techniques.pipeline.{path}")
        return maker(ranks, stages, microbatches)

    return make_schedule_of_module


SCHEDULES: dict[str, Maker] = {
    "naive": make_naive_schedule,
    "gpipe": make_gpipe_schedule,
    "1f1b": import_when_called("interleaved_schedules:make_1f1b_schedule"),
    "interleaved_1f1b": import_when_called("interleaved_schedules:make_interleaved_1f1b_schedule"),
    "zero_bubble": import_when_called("interleaved_schedules:make_zero_bubble_schedule"),
    "zbv": import_when_called("v_schedules:make_zbv_schedule"),
    "dualpipev": import_when_called("v_schedules:make_dualpipev_schedule"),
}


def list_stage_ranks(plan: Schedule) -> list[int]:
    """Return the rank that holds each stage."""
    ranks = {action.stage: rank for rank, actions in enumerate(plan) for action in actions}
    return [ranks[stage] for stage in sorted(ranks)]


def find_dependencies(action: Action, stages: int) -> list[Action]:
    """Return the actions that must be complete before an action can start.

    In the result, an action of kind B is complete as soon as either B or I is complete.
    """
    kind, stage, microbatch = action
    if kind == "F":
        return [Action("F", stage - 1, microbatch)] if stage else []
    if kind == "W":
        return [Action("B", stage, microbatch)]
    forward = Action("F", stage, microbatch)
    if stage == stages - 1:
        return [forward]
    return [forward, Action("B", stage + 1, microbatch)]


def find_missing_dependency(action: Action, stages: int, done: Container[Action]) -> Action | None:
    """Return an incomplete action on which `action` depends, or None if all its dependencies are complete."""
    for dependency in find_dependencies(action, stages):
        if dependency not in done:
            return dependency
    return None


class Span(NamedTuple):
    """An action with its start and end times, in seconds or in units of one forward."""

    action: Action
    start: float
    end: float


Timeline = Sequence[Sequence[Span]]  # one sequence of spans per rank

DURATIONS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # duration of each kind of action, in units of one forward


def simulate_schedule(plan: Schedule, stages: int) -> list[list[Span]]:
    """Return the spans of each rank's actions, in units of one forward.

    The simulation assumes that messages take no time. Raises ValueError, which names the blocked action, if the
    schedule deadlocks.
    """
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in plan]
    has_progressed = True
    while has_progressed:
        has_progressed = False
        for local_spans, actions in zip(spans, plan, strict=True):
            for action in actions[len(local_spans) :]:
                if find_missing_dependency(action, stages, ends) is not None:
                    break
                start = local_spans[-1].end if local_spans else 0.0
                for dependency in find_dependencies(action, stages):
                    start = max(start, ends[dependency])
                end = start + DURATIONS[action.kind]
                local_spans.append(Span(action, start, end))
                ends[action.awaited] = end
                has_progressed = True

    for rank, actions in enumerate(plan):
        if len(spans[rank]) < len(actions):
            action = actions[len(spans[rank])]
            missing = find_missing_dependency(action, stages, ends)
            raise ValueError(f"deadlock: on rank {rank}, the {action} waits for the {missing}, which never completes")
    return spans


def find_first_start_time(spans: Timeline) -> float:
    """Return the earliest start time over all ranks."""
    return min(span.start for span in chain.from_iterable(spans))


def compute_makespan(spans: Timeline) -> float:
    """Return the time from the first start to the last end over all ranks."""
    return max(span.end for span in chain.from_iterable(spans)) - find_first_start_time(spans)


def sum_span_durations(spans: Iterable[Span]) -> float:
    """Return the total duration of all spans."""
    return sum(span.end - span.start for span in spans)


def compute_bubble(spans: Timeline) -> float:
    """Return the bubble, which is the fraction of time that ranks are idle, averaged over all ranks."""
    return 1 - sum_span_durations(chain.from_iterable(spans)) / (compute_makespan(spans) * len(spans))


def make_schedule(settings: PipelineConfig) -> Schedule:
    """Return the schedule that a config selects. Raises UserError if a custom schedule is invalid."""
    name = settings.schedule
    sizes = (settings.processes, settings.stages, settings.microbatches)
    if name in SCHEDULES:
        return SCHEDULES[name](*sizes)
    # few runs have a custom schedule
    plan: Schedule = import_object("common.techniques.pipeline.custom_schedules:make_custom_schedule")(name, sizes)
    return plan


def format_timeline(spans: Timeline, width: int = 72) -> list[str]:
    """Return a text diagram with one line per rank.

    A digit is a forward, a letter is a backward, and a dot is idle time. Microbatch 0 is shown as 0 and a, microbatch 1
    as 1 and b, and so on. The symbols repeat after ten microbatches. If backwards are split, a lowercase letter is the
    gradient of the input, and an uppercase letter is the gradient of the weights.
    """
    symbols = {"F": "0123456789", "W": "ABCDEFGHIJ"}
    step_start = find_first_start_time(spans)
    scale = width / compute_makespan(spans)
    lines = []
    for local_spans in spans:
        line = ["."] * width
        for action, start, end in local_spans:
            symbol = symbols.get(action.kind, "abcdefghij")[action.microbatch % 10]
            first = round((start - step_start) * scale)
            last = min(width, max(first + 1, round((end - step_start) * scale)))
            line[first:last] = symbol * (last - first)
        lines.append("".join(line))
    return lines
