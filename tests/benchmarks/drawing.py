"""Drawings that the figures of several experiments share."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.measure import plots
from common.techniques.pipeline import report, schedules
from common.techniques.pipeline.schedules import Action, Span

STEP = 1e-3  # seconds of a planned forward
Figure = tuple[str, Callable[[Path, Any], None]]
"""The part that a figure shows, and the function that draws it."""


def draw_plan(path: Path, name: str, stages: int = 2, microbatches: int = 4) -> None:
    """A schedule with equal stages and messages that take no time."""
    played = schedules.simulate_schedule(schedules.SCHEDULES[name](stages, stages, microbatches), stages)
    lanes = {
        f"stage {stage}": [Span(span.action, span.start * STEP, span.end * STEP) for span in spans]
        for stage, spans in enumerate(played)
    }
    bubble = schedules.compute_bubble(played)
    title = f"{name} as planned: {stages} stages, {microbatches} microbatches, bubble {100 * bubble:.0f} %"
    report.draw_timeline(path, lanes, title)


def draw_step(path: Path, timeline: Sequence[Mapping[str, Any]], title: str) -> None:
    """A recorded step."""
    lanes: dict[str, list[Span]] = {}
    for entry in sorted(timeline, key=lambda entry: (entry["stage"], entry["start"])):
        action = Action(entry["kind"], entry["stage"], entry["microbatch"])
        lanes.setdefault(f"stage {entry['stage']}", []).append(Span(action, entry["start"], entry["end"]))
    report.draw_timeline(path, lanes, title)


def heights(part: Mapping[str, Any], sides: Sequence[str], factor: float) -> dict[str, tuple[float, float]]:
    """The median of each side and half its spread."""
    found = {}
    for side in sides:
        values = [factor * value for value in part["samples"][side]["seconds"]]
        found[textwrap.fill(side, 14)] = statistics.median(values), (max(values) - min(values)) / 2
    return found


def draw_bars(path: Path, part: Mapping[str, Any]) -> None:
    """Milliseconds of a step of each side."""
    plots.draw_bar_chart(path, heights(part, list(part["samples"]), 1e3), "ms a step")


def steps_of(part: str, names: Mapping[str, str]) -> dict[str, Figure]:
    """Figures of the recorded steps of a part's sides, by the file's name."""

    def one(side: str, words: str) -> Callable[[Path, Any], None]:
        return lambda path, content: draw_step(path, content["timelines"][side], words)

    return {f"{part.replace('/', '_')}_{side.split()[-1]}": (part, one(side, words)) for side, words in names.items()}
