"""Drawings shared by the figures of several experiments."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.measure import plots
from common.techniques.pipeline import schedules, timeline_chart
from common.techniques.pipeline.schedules import Action, Span
from tests.benchmarks import labels
from tests.benchmarks.measure import Samples

FORWARD = 1e-3  # duration of a planned forward pass; the axis of a timeline counts thousandths
NAMES = {"naive": "Naive", "gpipe": "GPipe", "1f1b": "1F1B"}
Figure = tuple[str, Callable[[Path, Any], None]]
"""The part that a figure shows, and the function that draws it."""


def draw_plan(path: Path, name: str, stages: int = 2, microbatches: int = 4) -> None:
    """Draw a schedule with equal stages and messages that take no time."""
    actions = schedules.SCHEDULES[name](stages, stages, microbatches)
    simulated = schedules.simulate_schedule(actions, stages)
    lanes = {}
    for stage, spans in enumerate(simulated):
        lanes[f"stage {stage}"] = [Span(span.action, span.start * FORWARD, span.end * FORWARD) for span in spans]
    bubble = schedules.compute_bubble(simulated)
    title = f"{NAMES[name]} as planned: {stages} stages, {microbatches} microbatches, bubble {100 * bubble:.0f} %"
    timeline_chart.draw_timeline(path, lanes, title, "time in forward passes of one microbatch")


def draw_step(path: Path, timeline: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draw a recorded step."""
    lanes: dict[str, list[Span]] = {}
    for event in sorted(timeline, key=lambda event: (event["stage"], event["start"])):
        action = Action(event["kind"], event["stage"], event["microbatch"])
        spans = lanes.setdefault(f"stage {event['stage']}", [])
        spans.append(Span(action, event["start"], event["end"]))
    timeline_chart.draw_timeline(path, lanes, title)


def heights(part: Mapping[str, Any], sides: Sequence[str], factor: float) -> dict[str, tuple[float, float]]:
    """Return the median of each side and half its spread."""
    samples = Samples.from_part(part)
    bars = {}
    for side in sides:
        times = [factor * seconds for seconds in samples.list_counted(side)]
        label = labels.reword("", side)
        if len(sides) <= plots.MAX_VERTICAL_BARS:
            label = textwrap.fill(label, 14, break_long_words=False)
        bars[label] = statistics.median(times), (max(times) - min(times)) / 2
    return bars


def make_bar_drawer(title: str) -> Callable[[Path, Any], None]:
    """Return a function that draws the milliseconds of a step of each side."""

    def draw(path: Path, part: Mapping[str, Any]) -> None:
        plots.draw_bar_chart(path, heights(part, list(part["samples"]), 1e3), "ms per step", title=title)

    return draw


def make_step_drawer(side: str, title: str) -> Callable[[Path, Any], None]:
    """Return a function that draws the recorded step of a side."""
    return lambda path, content: draw_step(path, content["timelines"][side], title)


def steps_of(part: str, titles: Mapping[str, str]) -> dict[str, Figure]:
    """Return figures of the recorded steps of a part's sides, by the file's name."""
    step_figures = {}
    for side, title in titles.items():
        file_name = f"{part.replace('/', '_')}_{side.split()[-1]}"
        step_figures[file_name] = (part, make_step_drawer(side, title))
    return step_figures
