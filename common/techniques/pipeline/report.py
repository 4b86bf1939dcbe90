"""Report on the ranks of a pipeline: idle shares, and a diagram of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from common.ranks.rendezvous import World
from common.runs.result import ReportData
from common.system.text import format_count
from common.techniques.pipeline import schedules
from common.techniques.pipeline.executor import ScheduleExecutor
from common.techniques.pipeline.schedules import Action, Schedule, Span, Timeline
from configs.pipeline import PipelineConfig

ENGINES = {"own": "built-in engine", "torch": "torch's engine"}
MAX_LISTED_LAYERS = 4  # if a stage has more layers, only the first and the last are listed


def compute_idle_shares(steps: Sequence[Timeline]) -> list[float]:
    """Return, for each rank, the fraction of a step in which the rank is idle (median over all steps)."""
    shares_of_steps = []
    for step in steps:
        makespan = schedules.compute_makespan(step)
        shares_of_steps.append([1 - schedules.sum_span_durations(spans) / makespan for spans in step])
    return [median(shares) for shares in zip(*shares_of_steps, strict=True)]


def select_median_step(steps: Sequence[Timeline]) -> Timeline:
    """Return the step with the median duration."""
    return sorted(steps, key=schedules.compute_makespan)[len(steps) // 2]


@dataclass(frozen=True)
class PipelineReport:
    """Report on the ranks of a pipeline, computed from the time stamps of all ranks."""

    ideal_bubble: float
    """Idle share (0 to 1) of the schedule if all stages take equally long and messages take no time."""
    idle_shares: list[float]
    """Measured idle share (0 to 1) of each rank. Empty if there is one stage, which never waits for another stage."""
    step: Timeline
    """Spans of each rank in the step with the median duration."""
    layers: Sequence[Sequence[str]] = ()
    """Names of the layers of each stage."""
    schedule: str = ""
    """Description of the schedule."""
    lane: str = "rank"
    """Name of the units whose idle shares are reported: `rank`, or `stage` if one process uses several devices."""
    drawing: tuple[Path, str] | None = None
    """File and title of a drawing of one step, or None if no drawing is requested."""

    @classmethod
    def from_spans(
        cls,
        gathered: Sequence[Timeline],
        plan: Schedule,
        stages: int,
        *,
        layers: Sequence[Sequence[str]] = (),
        schedule: str = "",
        lane: str = "rank",
        picture: tuple[Path, str] | None = None,
    ) -> PipelineReport:
        """Create a report from the recorded steps of all ranks.

        `gathered[p][i]` contains the spans of rank p in step i.
        """
        steps: list[Timeline] = list(zip(*gathered, strict=True))
        ideal = schedules.compute_bubble(schedules.simulate_schedule(plan, stages))
        # a run that is resumed after its last step has no steps
        idle = compute_idle_shares(steps) if steps and stages > 1 else []
        step = select_median_step(steps) if steps else []
        return cls(ideal, idle, step, layers, schedule, lane, picture)

    @classmethod
    def gather(
        cls, pipe: ScheduleExecutor, group: World, cfg: PipelineConfig, folder: Path, model: str
    ) -> PipelineReport:
        """Create a report on all ranks of a group. All ranks of the group must call this method.

        The report is complete only on rank 0 of the group. If `cfg.plot` is true, `rows` writes a drawing of one step
        to timeline.png in `folder`. `model` describes the model and the batch in the title of the drawing.
        """
        sizes = f"{format_count(cfg.stages, 'stage')}, {format_count(cfg.microbatches, 'microbatch')}"
        schedule = f"{cfg.schedule} ({ENGINES[cfg.engine]}), {sizes}"
        title = f"one step of {model}, {format_count(group.size, 'rank')}: {schedule}"
        picture = (folder / "timeline.png", title) if cfg.plot else None
        packed = [list(map(pack_span, spans)) for spans in pipe.collect_spans()]
        gathered = []
        for steps in group.gather(packed):
            gathered.append([list(map(unpack_span, spans)) for spans in steps])
        return cls.from_spans(gathered, pipe.plan, cfg.stages, layers=pipe.layers, schedule=schedule, picture=picture)

    @property
    def spans_by_stage(self) -> dict[int, list[Span]]:
        """Spans of each stage in the step with the median duration."""
        spans_by_stage: dict[int, list[Span]] = {}
        for span in chain.from_iterable(self.step):
            spans_by_stage.setdefault(span.action.stage, []).append(span)
        return dict(sorted(spans_by_stage.items()))

    def draw_median_step(self) -> dict[str, str]:
        """Draw the step with the median duration and return a row of the final table with a link to the drawing.

        Return an empty dict if there is no step or no drawing is requested.
        """
        if self.drawing is None or not self.step:
            return {}
        path, title = self.drawing
        lanes = {f"stage {stage}": spans for stage, spans in self.spans_by_stage.items()}
        from common.techniques.pipeline.timeline_chart import draw_timeline  # only few runs draw

        draw_timeline(path, lanes, title)
        return {"timeline": path.absolute().as_uri()}

    def rows(self) -> dict[str, str]:
        """Return the rows of the final table. This method also draws the timeline, if a drawing is requested."""
        rows = {}
        if self.schedule:
            rows["schedule"] = self.schedule
        if self.layers:
            rows["stages"] = "\n".join(map(describe_layers, self.layers))
        if not self.step:
            return rows
        if self.idle_shares:
            rows["ideal bubble"] = f"{self.ideal_bubble:.1%}  (for equal stages and messages that take no time)"
            shares = [f"{self.lane} {number}: {share:.1%}" for number, share in enumerate(self.idle_shares)]
            rows["idle share"] = "  ".join(shares)
        rows["pipeline"] = self.format_median_step()
        return rows | self.draw_median_step()

    def format_median_step(self) -> str:
        """Return a text diagram of the step with the median duration, with one line per stage."""
        milliseconds = schedules.compute_makespan(self.step) * 1e3
        lines = [f"{milliseconds:.2f} ms from the first forward to the last backward of a step"]
        by_stage = self.spans_by_stage
        for stage, line in zip(by_stage, schedules.format_timeline(list(by_stage.values())), strict=True):
            lines.append(f"stage {stage} |{line}|")
        is_split = any(span.action.kind == "W" for span in chain.from_iterable(self.step))
        weights = " (uppercase letter: gradient of the weights)" if is_split else ""
        lines.append(f"digit: forward of the microbatch with that number; letter: backward{weights}; dot: idle")
        return "\n".join(lines)

    def result(self) -> ReportData:
        """Return the values for result.json. Times are given in seconds since the start of the step."""
        step_start = schedules.find_first_start_time(self.step) if self.step else 0.0
        timeline = []
        for rank, spans in enumerate(self.step):
            for span in spans:
                times = {"start": round(span.start - step_start, 7), "end": round(span.end - step_start, 7)}
                timeline.append({"rank": rank, **span.action._asdict(), **times})
        measured = {
            "idle_share": self.idle_shares,
            "timeline": timeline,
            "stages": [list(names) for names in self.layers],
        }
        return ReportData(outcome={"ideal_bubble": self.ideal_bubble}, measured=measured)


def pack_span(span: Span) -> list[Any]:
    """Convert a span to a flat list for JSON."""
    return [*span.action, span.start, span.end]


def unpack_span(packed: Sequence[Any]) -> Span:
    """Convert the output of `pack_span` back to a span."""
    *action, start, end = packed
    return Span(Action(*action), start, end)


def describe_layers(names: Sequence[str]) -> str:
    """Return a short description of the layers of a stage."""
    return " ".join(names) if len(names) <= MAX_LISTED_LAYERS else f"{names[0]} to {names[-1]}"
