"""Pipeline schedules as plain data: for each rank, the ordered list of its actions.

An action is (kind, stage, microbatch). A kind is F, forward; B, backward; and, where a library splits the backward,
I, the gradient of the input, and W, the gradient of the weights. Messages are not part of a schedule: they follow
from it. Imports no torch.

    python -m common.pipeline.schedules gpipe 2 4            print a schedule: name, ranks, microbatches
    python -m common.pipeline.schedules mine.py:f 2 4 2      your own schedule, with two stages a rank

GPipe is Huang et al. 2019 (arXiv 1811.06965); 1F1B is PipeDream-Flush, Narayanan et al. 2021 (arXiv 2006.09503),
section 2.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from common.core.errors import exit_on_user_error
from common.core.own_function import find_kept_file, load_function, locate_errors, prefer_kept
from common.core.text import format_count
from common.runs.provenance import keep_function_file
from configs.pipeline import PipelineConfig, Stages


class Action(NamedTuple):
    """One unit of work: the forward (F), backward (B), or half a backward (I, W) of a microbatch on a stage."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        word = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}[self.kind]
        return f"{word} of microbatch {self.microbatch} on stage {self.stage}"


Schedule = list[list[Action]]
Maker = Callable[[int, int, int], Schedule]


def list_local_stages(rank: int, ranks: int, stages: int) -> list[int]:
    """Return the stages of a rank: every `ranks`-th one, so that a microbatch visits all ranks in turn."""
    return list(range(rank, stages, ranks))


def make_naive(ranks: int, stages: int, microbatches: int) -> Schedule:
    """Return the schedule without overlap: a microbatch passes all stages and back before the next one starts."""
    single = make_gpipe(ranks, stages, 1)
    return [[a._replace(microbatch=m) for m in range(microbatches) for a in actions] for actions in single]


def make_gpipe(ranks: int, stages: int, microbatches: int) -> Schedule:
    """Return GPipe's schedule: all forwards, then all backwards. Keeps the activations of every microbatch."""
    plan: Schedule = []
    for rank in range(ranks):
        mine = list_local_stages(rank, ranks, stages)
        plan.append([Action("F", s, m) for s in mine for m in range(microbatches)])
        plan[-1] += [Action("B", s, m) for s in reversed(mine) for m in range(microbatches)]
    return plan


def make_1f1b(ranks: int, stages: int, microbatches: int) -> Schedule:
    """Return the 1F1B schedule: a backward as soon as one is ready, at most `stages - s` in flight at stage s.

    As long as GPipe, with less memory. Built by simulating ticks of equal length.
    """
    plan: Schedule = [[] for _ in range(ranks)]
    done: set[Action] = set()
    flying = [0] * stages
    while len(done) < 2 * stages * microbatches:
        tick: list[Action] = []
        for rank in range(ranks):
            mine = list_local_stages(rank, ranks, stages)
            wanted = [Action("B", s, m) for s in reversed(mine) for m in range(microbatches)]
            wanted += [Action("F", s, m) for s in reversed(mine) for m in range(microbatches) if flying[s] < stages - s]
            ready = (a for a in wanted if a not in done and all(n in done for n in find_dependencies(a, stages)))
            tick.extend(islice(ready, 1))
        for action in tick:
            flying[action.stage] += 1 if action.kind == "F" else -1
            plan[action.stage % ranks].append(action)
        done.update(tick)
    return plan


USAGE = "function(ranks, stages, microbatches) returns for each rank a list of ('F' or 'B', stage, microbatch)"
SCHEDULES: dict[str, Maker] = {"naive": make_naive, "gpipe": make_gpipe, "1f1b": make_1f1b}


def find_dependencies(action: Action, stages: int) -> list[Action]:
    """Return the actions that must be done before an action can start (B stands for B or I)."""
    kind, stage, m = action
    if kind == "F":
        return [Action("F", stage - 1, m)] if stage else []
    if kind == "W":
        return [Action("B", stage, m)]
    before = [Action("F", stage, m)]
    return [*before, Action("B", stage + 1, m)] if stage < stages - 1 else before


class Span(NamedTuple):
    """An action with its start and end, in seconds or in units of one forward."""

    action: Action
    start: float
    end: float


COST = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # of a kind of action, in units of one forward


def simulate_schedule(plan: Schedule, stages: int) -> list[list[Span]]:
    """Return when each rank's actions run, in units of one forward, if messages take no time.

    Raises ValueError, naming the action, on a deadlock.
    """
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in plan]
    while any(len(s) < len(p) for s, p in zip(spans, plan, strict=True)):
        moved = False
        for mine, actions in zip(spans, plan, strict=True):
            for action in actions[len(mine) :]:
                waits = find_dependencies(action, stages)
                if not all(n in ends for n in waits):
                    break
                start = max([ends[n] for n in waits] + [mine[-1].end if mine else 0.0])
                mine.append(Span(action, start, start + COST[action.kind]))
                ends[action._replace(kind="B") if action.kind == "I" else action] = mine[-1].end
                moved = True
        if not moved:
            rank = next(i for i, p in enumerate(plan) if len(spans[i]) < len(p))
            stuck = plan[rank][len(spans[rank])]
            missing = next(n for n in find_dependencies(stuck, stages) if n not in ends)
            raise ValueError(f"deadlock: rank {rank} waits at {stuck} for {missing}, which never comes before it")
    return spans


def check_schedule(plan: Schedule, ranks: int, stages: int, microbatches: int) -> None:
    """Raise ValueError, naming the action, unless the plan trains every microbatch once and cannot deadlock."""
    if len(plan) != ranks:
        raise ValueError(
            f"has {format_count(len(plan), 'list')} of actions, needs one for each of {format_count(ranks, 'rank')}"
        )
    for rank, actions in enumerate(plan):
        mine = list_local_stages(rank, ranks, stages)
        expected = {Action(kind, s, m) for kind in "FB" for s in mine for m in range(microbatches)}
        seen: set[Action] = set()
        for action in actions:
            if action not in expected:
                raise ValueError(f"rank {rank} has no such work: {tuple(action)}; its stages are {mine}")
            if action in seen:
                raise ValueError(f"rank {rank} does the {action} twice")
            seen.add(action)
        if expected - seen:
            raise ValueError(f"rank {rank} never does the {min(expected - seen)}")
    simulate_schedule(plan, stages)


def compute_makespan(spans: Sequence[Sequence[Span]]) -> float:
    """Return the time from the first start to the last end over all ranks."""
    return max(span.end for mine in spans for span in mine) - min(span.start for mine in spans for span in mine)


def compute_bubble(spans: Sequence[Sequence[Span]]) -> float:
    """Return the bubble: the fraction of all ranks' time in which they are idle."""
    busy = sum(span.end - span.start for mine in spans for span in mine)
    return 1 - busy / (compute_makespan(spans) * len(spans))


def make_schedule(settings: PipelineConfig) -> Schedule:
    """Return the schedule that the config names. Raises UserError for a custom one that cannot work."""
    name, sizes = settings.schedule, (settings.processes, settings.stages, settings.microbatches)
    if name in SCHEDULES:
        return SCHEDULES[name](*sizes)
    if settings.engine == "torch":
        return [[] for _ in range(settings.processes)]  # the library makes the order itself
    return make_custom_schedule(name, sizes)


def make_custom_schedule(name: str, sizes: tuple[int, int, int]) -> Schedule:
    """Return what `FILE.py:function` gives for ranks, stages and microbatches. Raises UserError if it cannot work."""
    maker = load_function("schedule", name, ", ".join(SCHEDULES))
    with locate_errors("schedule", name, maker, USAGE):
        plan = [[Action(*action) for action in actions] for actions in maker(*sizes)]
        check_schedule(plan, *sizes)
    return plan


def format_timeline(spans: Sequence[Sequence[Span]], width: int = 72) -> list[str]:
    """Return one line of text a rank: a digit is a forward of that microbatch, a letter a backward, a dot is idle.

    Microbatch 0 is shown as 0 and a, 1 as 1 and b, and so on, repeating after ten. Where the backward is split, the
    gradient of the input is the small letter and that of the weights the capital.
    """
    marks = {"F": "0123456789", "W": "ABCDEFGHIJ"}
    start = min(span.start for mine in spans for span in mine)
    scale = width / compute_makespan(spans)
    lines = []
    for mine in spans:
        line = ["."] * width
        for action, begin, end in mine:
            mark = marks.get(action.kind, "abcdefghij")[action.microbatch % 10]
            first = round((begin - start) * scale)
            last = min(width, max(first + 1, round((end - start) * scale)))
            line[first:last] = mark * (last - first)
        lines.append("".join(line))
    return lines


def check_schedule_of_config(settings: object, code: Path | None = None) -> None:
    """Raise UserError for a config whose schedule cannot work; configs without a pipeline pass.

    `code` is the source of the run that has these settings already, for the file that it keeps.
    """
    if isinstance(settings, Stages) and settings.make_pipeline_config().engine == "own":
        pipeline = settings.make_pipeline_config()
        make_schedule(use_kept_schedule_file(pipeline, code) if code else pipeline)


# ---- the file of a custom schedule in the source of a run


def use_kept_schedule_file(settings: PipelineConfig, code: Path) -> PipelineConfig:
    """Return the settings with the file of a custom schedule that a run keeps in its source, if it keeps one."""
    name = settings.schedule
    return replace(settings, schedule=prefer_kept(name, find_kept_file("schedule", name, code)))


def copy_schedule_file(settings: object, code: Path, *, anew: bool = False) -> None:
    """Copy the file of a custom schedule into a run's source, if it is not there yet, or `anew`. Raises UserError."""
    if isinstance(settings, Stages):
        keep_function_file("schedule", settings.make_pipeline_config().schedule, code, anew=anew)


def main() -> None:
    """Print a schedule as a diagram, one line a rank."""
    parser = argparse.ArgumentParser(prog="python -m common.pipeline.schedules", description=main.__doc__)
    parser.add_argument("schedule", help=f"{', '.join(SCHEDULES)}, or FILE.py:function")
    for number in ("ranks", "microbatches"):
        parser.add_argument(number, type=int, choices=range(1, 65), metavar=number)
    parser.add_argument("each", type=int, nargs="?", default=1, choices=range(1, 9), help="stages of each rank")
    asked = parser.parse_args()
    stages = asked.ranks * asked.each
    settings = PipelineConfig(
        schedule=asked.schedule, stages=stages, stages_per_process=asked.each, microbatches=asked.microbatches
    )
    spans = simulate_schedule(make_schedule(settings), stages)
    for rank, line in enumerate(format_timeline(spans, width=round(compute_makespan(spans)))):
        print(f"rank {rank} |{line}|")
    print(f"idle share {compute_bubble(spans):.1%}  (a forward takes 1, a backward 2)")


if __name__ == "__main__":
    with exit_on_user_error():
        main()
