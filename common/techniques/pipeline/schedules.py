"""Pipeline schedules as data: an ordered list of actions for each rank. This module does not import torch.

An action is (kind, stage, microbatch). The kind is F (forward) or B (backward). A schedule may split a backward into I
(gradient of the input) and W (gradient of the weights), because only I delays other ranks. A schedule does not contain
messages, because they can be derived from the actions. It also determines which rank holds a stage: the rank that
executes the stage's actions.

    python -m common.techniques.pipeline.schedules gpipe 2 4            print GPipe for 2 ranks and 4 microbatches
    python -m common.techniques.pipeline.schedules mine.py:f 2 4 2      print a custom schedule with 2 stages per rank

GPipe is described by Huang et al. 2019 (arXiv 1811.06965). 1F1B is called PipeDream-Flush by Narayanan et al. 2021
(arXiv 2006.09503), section 2. `interleaved_schedules` and `v_schedules` contain the other schedules.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from common.config.custom_function import convert_errors_of_user_file, load_function
from common.config.lookup import import_object
from common.system.errors import exit_on_user_error
from common.system.text import format_count
from configs.pipeline import PipelineConfig, PipelineExperiment

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


def make_1f1b_schedule(ranks: int, stages: int, microbatches: int) -> Schedule:
    """Return the 1F1B schedule, in which each backward starts as soon as it is ready.

    At most `stages - s` microbatches are in flight at stage s. 1F1B takes as long as GPipe but needs less memory. This
    function builds the schedule by simulating ticks of equal length.
    """
    plan: Schedule = [[] for _ in range(ranks)]
    done: set[Action] = set()
    in_flight = [0] * stages

    def choose_action(rank: int) -> Action | None:
        """Return an action of a rank that can start now. Backwards have priority."""
        for kind in "BF":
            for stage in reversed(list_local_stages(rank, ranks, stages)):
                if kind == "F" and in_flight[stage] >= stages - stage:
                    continue
                for microbatch in range(microbatches):
                    action = Action(kind, stage, microbatch)
                    if action not in done and find_missing_dependency(action, stages, done) is None:
                        return action
        return None

    while len(done) < 2 * stages * microbatches:
        tick = [action for rank in range(ranks) if (action := choose_action(rank))]
        for action in tick:
            in_flight[action.stage] += 1 if action.kind == "F" else -1
            plan[action.stage % ranks].append(action)
        done.update(tick)
    return plan


def import_when_called(path: str) -> Maker:
    """Return a function that imports the function `module:name` of this package when it is called."""

    def make_schedule_of_module(ranks: int, stages: int, microbatches: int) -> Schedule:
        maker: Maker = import_object(f"common.techniques.pipeline.{path}")
        return maker(ranks, stages, microbatches)

    return make_schedule_of_module


USAGE = (
    "function(ranks, stages, microbatches) must return, for each rank, a list of tuples (pass, stage, microbatch), "
    "where pass is 'F', 'B', 'I' or 'W'"
)
SCHEDULES: dict[str, Maker] = {
    "naive": make_naive_schedule,
    "gpipe": make_gpipe_schedule,
    "1f1b": make_1f1b_schedule,
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
    return SCHEDULES[name](*sizes) if name in SCHEDULES else make_custom_schedule(name, sizes)


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


def check_schedule_of_config(settings: PipelineExperiment) -> None:
    """Raise UserError if the pipeline schedule of a config is invalid."""
    pipeline = settings.make_pipeline_config()
    if pipeline.engine == "own":
        make_schedule(pipeline)


def main() -> None:
    """Print a pipeline schedule as a text diagram with one line per rank."""
    parser = argparse.ArgumentParser(prog="python -m common.techniques.pipeline.schedules", description=main.__doc__)
    parser.add_argument("schedule", help=f"schedule to print: {', '.join(SCHEDULES)} or FILE.py:function")
    for name in ("ranks", "microbatches"):
        help_text = f"number of {name}, from 1 to 64"
        parser.add_argument(name, type=int, choices=range(1, 65), metavar=name, help=help_text)
    parser.add_argument("each", type=int, nargs="?", default=1, choices=range(1, 9), help="number of stages per rank")
    args = parser.parse_args()
    stages = args.ranks * args.each
    settings = PipelineConfig(
        schedule=args.schedule, stages=stages, stages_per_process=args.each, microbatches=args.microbatches
    )
    spans = simulate_schedule(make_schedule(settings), stages)
    for rank, line in enumerate(format_timeline(spans, width=round(compute_makespan(spans)))):
        print(f"rank {rank} |{line}|")
    print(f"idle share {compute_bubble(spans):.1%}  (a forward takes 1 unit of time, and a backward takes 2 units)")


if __name__ == "__main__":
    with exit_on_user_error():
        main()
