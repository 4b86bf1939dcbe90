"""What the ranks of a pipeline did when: its idle share, the memory that it took, and a step of it as a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from common.measure import plots
from common.pipeline import schedules
from common.pipeline.schedules import Schedule, Span

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
    """The share of a step that each process waits, the median over steps; `steps[i][p]` are the spans of process p."""
    shares: list[list[float]] = [[] for _ in steps[0]]
    for step in steps:
        wall = schedules.length(step)
        for process, mine in enumerate(step):
            shares[process].append(1 - sum(s.end - s.start for s in mine) / wall)
    return [median(values) for values in shares]


def typical(steps: Sequence[Sequence[Sequence[Span]]]) -> Sequence[Sequence[Span]]:
    """The step of median length."""
    return sorted(steps, key=schedules.length)[len(steps) // 2]


@dataclass(frozen=True)
class PipelineReport:
    """What a pipeline's processes did, out of the time stamps of all of them."""

    ideal: float
    """The idle share of the schedule itself: equal stages, messages that take no time."""
    idle: list[float]
    """The idle share of each process."""
    step: Sequence[Sequence[Span]]
    """The spans of each process in the step of median length."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """The most bytes that each process or device held."""
    place: str = "process"
    """What works on its own: a process, or with several devices in one process each of them."""

    @classmethod
    def of(
        cls,
        gathered: Sequence[Sequence[Sequence[Span]]],
        plan: Schedule,
        stages: int,
        memory: Mapping[str, int] | None = None,
        place: str = "process",
    ) -> PipelineReport:
        """From every process's kept steps: `gathered[p][i]` are the spans of process p in step i."""
        steps = list(zip(*gathered, strict=True))
        ideal = schedules.idle_share(schedules.play(plan, stages))
        idle, step = (idle_shares(steps), typical(steps)) if steps else ([], [])  # resumed at its end: no steps
        return cls(ideal, idle, step, memory or {}, place)

    @property
    def by_stage(self) -> dict[int, list[Span]]:
        """The spans of each stage in the step of median length."""
        spans = [span for mine in self.step for span in mine]
        return {n: [s for s in spans if s.action.stage == n] for n in sorted({s.action.stage for s in spans})}

    def plot(self, folder: Path, title: str) -> dict[str, str]:
        """Draw the step of median length as timeline.png; the table's row for it, none where it cannot be drawn."""
        if not self.step or importlib.util.find_spec("matplotlib") is None:
            return {}
        path = folder / "timeline.png"
        draw_timeline(path, {f"stage {n}": spans for n, spans in self.by_stage.items()}, title)
        return {"timeline": str(path)}

    def rows(self) -> dict[str, str]:
        """For the table."""
        if not self.step:
            return {}
        lines = schedules.draw(list(self.by_stage.values()))
        lines = [f"stage {stage} |{line}|" for stage, line in zip(self.by_stage, lines, strict=True)]
        seconds = schedules.length(self.step)
        amounts = [f"{name}: {held / 2**20:,.0f} MiB" for name, held in self.memory.items()]
        split = any(span.action.kind == "W" for mine in self.step for span in mine)
        capitals = " (capital: of the weights)" if split else ""
        words = f"{seconds * 1e3:.2f} ms; digit: forward of that microbatch, letter: backward{capitals}, dot: waiting"
        return {
            "ideal bubble": f"{self.ideal:.1%}  (equal stages, messages that take no time)",
            "idle share": "  ".join(f"{self.place} {number}: {share:.1%}" for number, share in enumerate(self.idle)),
            **({"peak memory": "  ".join(amounts)} if amounts else {}),
            "one step": "\n".join([words, *lines]),
        }

    def result(self) -> dict[str, Any]:
        """For result.json; times in seconds from the start of the step."""
        start = min((span.start for mine in self.step for span in mine), default=0.0)
        timeline = [
            {"process": p, "kind": s.action.kind, "stage": s.action.stage, "microbatch": s.action.microbatch}
            | {"start": round(s.start - start, 7), "end": round(s.end - start, 7)}
            for p, mine in enumerate(self.step)
            for s in mine
        ]
        memory = {"peak_memory": dict(self.memory)} if self.memory else {}
        return {"ideal_bubble": self.ideal, "idle_share": self.idle, **memory, "timeline": timeline}
