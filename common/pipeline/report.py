"""What the ranks of a pipeline did when: their idle shares, and a step as a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common.distributed.rendezvous import World
from common.measure import plots
from common.pipeline import schedules
from common.pipeline.executor import PipelineEngine
from common.pipeline.schedules import Schedule, Span
from common.runs.result import Added
from configs.pipeline import PipelineConfig

Steps = Sequence[Sequence[Span]]  # the kept steps of one rank

FEW = 4  # layers of a stage that are named one by one
WORK = {  # what a kind of action is called, and its colours for even and odd microbatches
    "F": ("forward", ("#4878a8", "#7ba4cc")),
    "B": ("backward", ("#d1783a", "#e8a878")),
    "I": ("backward: gradient of the input", ("#d1783a", "#e8a878")),
    "W": ("backward: gradient of the weights", ("#6a9a52", "#9cc287")),
}


def draw_timeline(path: Path, lanes: Mapping[str, Sequence[Span]], title: str = "") -> None:
    """One lane for each stage, a bar for each action with its microbatch's number; empty is waiting."""
    at = plots.axes(9.0, 1.4 + 0.55 * len(lanes))
    start = min(span.start for spans in lanes.values() for span in spans)
    length = max(span.end for spans in lanes.values() for span in spans) - start
    told: set[str] = set()
    for row, spans in enumerate(lanes.values()):
        for (kind, _, microbatch), begin, end in spans:
            word, colours = WORK[kind]
            left, width = (begin - start) * 1e3, (end - begin) * 1e3
            label = None if word in told else word
            told.add(word)
            at.barh(row, width, left=left, height=0.7, color=colours[microbatch % 2], label=label)
            if width > 14 * length:  # in ms, of seconds: room for the number
                at.text(left + width / 2, row, str(microbatch), ha="center", va="center", color="white", fontsize=8)
    at.set_yticks(range(len(lanes)), list(lanes))
    at.set(xlabel="ms", xlim=(0, length * 1e3), title=title)
    at.invert_yaxis()
    at.legend(loc="upper center", bbox_to_anchor=(0.5, -0.32 if len(lanes) < 4 else -0.2), ncols=3, frameon=False)
    plots.save(at, path)


def idle_shares(steps: Sequence[Sequence[Sequence[Span]]]) -> list[float]:
    """The share of a step that each rank waits, the median over steps; `steps[i][p]` are the spans of rank p."""
    shares: list[list[float]] = [[] for _ in steps[0]]
    for step in steps:
        wall = schedules.compute_makespan(step)
        for rank, mine in enumerate(step):
            shares[rank].append(1 - sum(s.end - s.start for s in mine) / wall)
    return [median(values) for values in shares]


def typical(steps: Sequence[Sequence[Sequence[Span]]]) -> Sequence[Sequence[Span]]:
    """The step of median length."""
    return sorted(steps, key=schedules.compute_makespan)[len(steps) // 2]


@dataclass(frozen=True)
class PipelineReport:
    """What a pipeline's ranks did, out of the time stamps of all of them."""

    ideal: float
    """The idle share of the schedule itself: equal stages, messages that take no time."""
    idle: list[float]
    """The idle share of each rank."""
    step: Sequence[Sequence[Span]]
    """The spans of each rank in the step of median length."""
    layers: Sequence[Sequence[str]] = ()
    """The names of each stage's layers."""
    schedule: str = ""
    """What was played, in words."""
    lane: str = "rank"
    """What works on its own: a rank, or with several devices in one process the stage on each of them."""
    picture: tuple[Path, str] | None = None
    """Where to draw one step, and its title."""

    @classmethod
    def of(cls, gathered: Sequence[Steps], plan: Schedule, stages: int, **more: Any) -> PipelineReport:
        """From the kept steps of every rank: `gathered[p][i]` are the spans of rank p in step i."""
        steps = list(zip(*gathered, strict=True))
        ideal = schedules.compute_bubble(schedules.simulate_schedule(plan, stages))
        idle, step = (idle_shares(steps), typical(steps)) if steps else ([], [])  # resumed at its end: no steps
        return cls(ideal, idle, step, **more)

    @classmethod
    def gather(
        cls, pipe: PipelineEngine, group: World, cfg: PipelineConfig, folder: Path | None, title: str = ""
    ) -> PipelineReport:
        """Of a pipeline on the ranks of a group, which call it together; complete on its rank 0.

        With a `folder` it draws one step there, as timeline.png.
        """
        told = f"{cfg.schedule} ({cfg.engine}), {cfg.stages} stages, {cfg.microbatches} microbatches"
        own: Any = {
            "layers": pipe.layers,
            "schedule": told,
            "picture": (folder / "timeline.png", title or f"one step: {told}") if folder else None,
        }
        return cls.of(group.gather(pipe.spans()), pipe.plan, cfg.stages, **own)

    @property
    def by_stage(self) -> dict[int, list[Span]]:
        """The spans of each stage in the step of median length."""
        spans = [span for mine in self.step for span in mine]
        return {n: [s for s in spans if s.action.stage == n] for n in sorted({s.action.stage for s in spans})}

    def plot(self) -> dict[str, str]:
        """Draw the step of median length; the table's row for it, none where it cannot be drawn."""
        if self.picture is None or not self.step or importlib.util.find_spec("matplotlib") is None:
            return {}
        path, title = self.picture
        draw_timeline(path, {f"stage {n}": spans for n, spans in self.by_stage.items()}, title)
        return {"timeline": str(path)}

    def rows(self) -> dict[str, str]:
        """For the table; draws the picture."""
        rows = {"schedule": self.schedule, "stages": "\n".join(map(describe_layers, self.layers))}
        names = {name: words for name, words in rows.items() if words}
        if not self.step:
            return names
        lines = schedules.format_timeline(list(self.by_stage.values()))
        lines = [f"stage {stage} |{line}|" for stage, line in zip(self.by_stage, lines, strict=True)]
        seconds = schedules.compute_makespan(self.step)
        split = any(span.action.kind == "W" for mine in self.step for span in mine)
        capitals = " (capital: of the weights)" if split else ""
        words = f"{seconds * 1e3:.2f} ms; digit: forward of that microbatch, letter: backward{capitals}, dot: waiting"
        return {
            **names,
            "ideal bubble": f"{self.ideal:.1%}  (equal stages, messages that take no time)",
            "idle share": "  ".join(f"{self.lane} {number}: {share:.1%}" for number, share in enumerate(self.idle)),
            "one step": "\n".join([words, *lines]),
            **self.plot(),
        }

    def result(self) -> Added:
        """For result.json; times in seconds from the start of the step."""
        start = min((span.start for mine in self.step for span in mine), default=0.0)
        timeline = [
            {"rank": p, "kind": s.action.kind, "stage": s.action.stage, "microbatch": s.action.microbatch}
            | {"start": round(s.start - start, 7), "end": round(s.end - start, 7)}
            for p, mine in enumerate(self.step)
            for s in mine
        ]
        measured = {"idle_share": self.idle, "timeline": timeline, "stages": [list(names) for names in self.layers]}
        return Added({"ideal_bubble": self.ideal}, measured)


def describe_layers(names: Sequence[str]) -> str:
    """The layers of a stage in few words."""
    return " ".join(names) if len(names) <= FEW else f"{names[0]} to {names[-1]}"
