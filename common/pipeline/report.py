"""Report on the ranks of a pipeline: when each worked on what, their idle shares, and a step as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common.core.text import format_count
from common.distributed.rendezvous import World
from common.measure import plots
from common.pipeline import schedules
from common.pipeline.executor import PipelineEngine
from common.pipeline.schedules import Action, Schedule, Span
from common.runs.result import Facts
from configs.pipeline import PipelineConfig

Steps = Sequence[Sequence[Span]]  # the kept steps of one rank

ENGINES = {"own": "built-in engine", "torch": "torch's engine"}
FEW = 4  # layers of a stage that are named one by one
WORK = {  # the name of a kind of action, and its colours for even and odd microbatches
    "F": ("forward", ("#4878a8", "#7ba4cc")),
    "B": ("backward", ("#d1783a", "#e8a878")),
    "I": ("backward: gradient of the input", ("#d1783a", "#e8a878")),
    "W": ("backward: gradient of the weights", ("#6a9a52", "#9cc287")),
}


def draw_timeline(path: Path, lanes: Mapping[str, Sequence[Span]], title: str = "") -> None:
    """Draw one lane for each stage, a bar for each action with its microbatch's number; empty is waiting.

    Where a bar is too narrow for its number, that of a forward stands above it and others below; numbers that would
    overlap are left out.
    """
    at = plots.make_axes(9.0, 1.4 + 0.55 * len(lanes))
    start = min(span.start for spans in lanes.values() for span in spans)
    length = max(span.end for spans in lanes.values() for span in spans) - start
    in_legend: set[str] = set()
    for row, spans in enumerate(lanes.values()):
        free = {-1: -1.0, 1: -1.0}  # where the next number above and below the lane may begin, in ms
        for (kind, _, microbatch), begin, end in spans:
            word, colours = WORK[kind]
            left, width = (begin - start) * 1e3, (end - begin) * 1e3
            label = None if word in in_legend else word
            in_legend.add(word)
            at.barh(row, width, left=left, height=0.7, color=colours[microbatch % 2], label=label)
            number, middle, side = str(microbatch), left + width / 2, -1 if kind == "F" else 1
            wide = 8.5 * length * len(number)  # ms that the number takes across, by a length in seconds
            if width > wide:
                colour = "black" if microbatch % 2 else "white"  # on the lighter and the darker colour
                at.text(middle, row, number, ha="center", va="center", color=colour, fontsize=8)
            elif middle - 0.4 * wide > free[side]:
                at.text(middle, row + 0.42 * side, number, ha="center", va="center", fontsize=6)
                free[side] = middle + 0.4 * wide
    at.set_yticks(range(len(lanes)), list(lanes))
    at.set(xlabel="ms", xlim=(0, length * 1e3), ylim=(len(lanes) - 0.45, -0.55))  # the first lane on top
    at.set_title(title, fontsize=10)
    at.legend(loc="upper center", bbox_to_anchor=(0.5, -0.32 if len(lanes) < 4 else -0.2), ncols=3, frameon=False)
    plots.save_figure(at, path)


def compute_idle_shares(steps: Sequence[Sequence[Sequence[Span]]]) -> list[float]:
    """Return the fraction of a step that each rank waits, the median over steps.

    `steps[i][p]` are the spans of rank p in step i.
    """
    shares = []
    for step in steps:
        wall = schedules.compute_makespan(step)
        shares.append([1 - sum(span.end - span.start for span in mine) / wall for mine in step])
    return [median(own) for own in zip(*shares, strict=True)]


def select_median_step(steps: Sequence[Sequence[Sequence[Span]]]) -> Sequence[Sequence[Span]]:
    """Return the step of median length."""
    return sorted(steps, key=schedules.compute_makespan)[len(steps) // 2]


@dataclass(frozen=True)
class PipelineReport:
    """The report on a pipeline's ranks, from the time stamps of all of them."""

    ideal: float
    """The idle share of the schedule itself: equal stages, messages that take no time."""
    idle: list[float]
    """The idle share of each rank."""
    step: Sequence[Sequence[Span]]
    """The spans of each rank in the step of median length."""
    layers: Sequence[Sequence[str]] = ()
    """The names of each stage's layers."""
    schedule: str = ""
    """The schedule in words."""
    lane: str = "rank"
    """The unit that works on its own: a rank, or with several devices in one process a stage."""
    picture: tuple[Path, str] | None = None
    """File and title of the drawing of one step; None for no drawing."""

    @classmethod
    def from_spans(cls, gathered: Sequence[Steps], plan: Schedule, stages: int, **more: Any) -> PipelineReport:
        """Make the report from the kept steps of all ranks: `gathered[p][i]` are the spans of rank p in step i."""
        steps = list(zip(*gathered, strict=True))
        ideal = schedules.compute_bubble(schedules.simulate_schedule(plan, stages))
        if not steps:  # resumed at its end
            return cls(ideal, [], [], **more)
        return cls(ideal, compute_idle_shares(steps), select_median_step(steps), **more)

    @classmethod
    def gather(
        cls, pipe: PipelineEngine, group: World, cfg: PipelineConfig, folder: Path | None, model: str
    ) -> PipelineReport:
        """Make the report on a pipeline of the ranks of a group, which call it together; complete on its rank 0.

        With a `folder` it draws one step there, as timeline.png; `model` are model and batch in the words of its title.
        """
        sizes = f"{format_count(cfg.stages, 'stage')}, {format_count(cfg.microbatches, 'microbatch')}"
        schedule = f"{cfg.schedule} ({ENGINES[cfg.engine]}), {sizes}"
        title = f"one step of {model}, {format_count(group.size, 'rank')}: {schedule}"
        picture = (folder / "timeline.png", title) if folder else None
        own: Any = {"layers": pipe.layers, "schedule": schedule, "picture": picture}
        mine = [[[*span.action, span.start, span.end] for span in step] for step in pipe.collect_spans()]
        gathered = [
            [[Span(Action(*action), start, end) for *action, start, end in step] for step in rank]
            for rank in group.gather(mine)
        ]
        return cls.from_spans(gathered, pipe.plan, cfg.stages, **own)

    @property
    def by_stage(self) -> dict[int, list[Span]]:
        """The spans of each stage in the step of median length."""
        spans = [span for mine in self.step for span in mine]
        return {n: [s for s in spans if s.action.stage == n] for n in sorted({s.action.stage for s in spans})}

    def draw(self) -> dict[str, str]:
        """Draw the step of median length, if there is one and `picture`; returns the table's row for it."""
        if self.picture is None or not self.step:
            return {}
        path, title = self.picture
        draw_timeline(path, {f"stage {n}": spans for n, spans in self.by_stage.items()}, title)
        return {"timeline": path.absolute().as_uri()}

    def rows(self) -> dict[str, str]:
        """Return the rows of the final table; draws the picture."""
        rows = {"schedule": self.schedule, "stages": "\n".join(map(describe_layers, self.layers))}
        names = {name: words for name, words in rows.items() if words}
        if not self.step:
            return names
        lines = schedules.format_timeline(list(self.by_stage.values()))
        lines = [f"stage {stage} |{line}|" for stage, line in zip(self.by_stage, lines, strict=True)]
        seconds = schedules.compute_makespan(self.step)
        split = any(span.action.kind == "W" for mine in self.step for span in mine)
        capitals = " (capital: of the weights)" if split else ""
        words = f"{seconds * 1e3:.2f} ms of a step, from its first forward to its last backward"
        legend = f"digit: forward of that microbatch, letter: backward{capitals}, dot: waiting"
        return {
            **names,
            "ideal bubble": f"{self.ideal:.1%}  (equal stages, messages that take no time)",
            "idle share": "  ".join(f"{self.lane} {number}: {share:.1%}" for number, share in enumerate(self.idle)),
            "pipeline": "\n".join([words, *lines, legend]),
            **self.draw(),
        }

    def result(self) -> Facts:
        """Return the values for result.json; times in seconds from the start of the step."""
        start = min((span.start for mine in self.step for span in mine), default=0.0)
        timeline = [
            {"rank": p, **s.action._asdict(), "start": round(s.start - start, 7), "end": round(s.end - start, 7)}
            for p, mine in enumerate(self.step)
            for s in mine
        ]
        measured = {"idle_share": self.idle, "timeline": timeline, "stages": [list(names) for names in self.layers]}
        return Facts(outcome={"ideal_bubble": self.ideal}, measured=measured)


def describe_layers(names: Sequence[str]) -> str:
    """Return the layers of a stage in few words."""
    return " ".join(names) if len(names) <= FEW else f"{names[0]} to {names[-1]}"
