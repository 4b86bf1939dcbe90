"""What a run says at its end: a table of its numbers, and what a pipeline's processes did when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from common import schedules
from common.schedules import Schedule, Span


def table(rows: Mapping[str, str]) -> str:
    """Two columns of text; a value of several lines stays in its column."""
    width = max(map(len, rows))
    lines = []
    for name, value in rows.items():
        first, *more = value.split("\n")
        lines.append(f"  {name:<{width}}  {first}".rstrip())
        lines += [f"  {'':<{width}}  {line}" for line in more]
    return "\n".join(lines)


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

    @classmethod
    def of(cls, gathered: Sequence[Sequence[Sequence[Span]]], plan: Schedule, stages: int) -> PipelineReport:
        """From every process's kept steps: `gathered[p][i]` are the spans of process p in step i."""
        steps = list(zip(*gathered, strict=True))
        ideal = schedules.idle_share(schedules.play(plan, stages))
        return cls(ideal, idle_shares(steps), typical(steps)) if steps else cls(ideal, [], [])  # resumed at its end

    def rows(self) -> dict[str, str]:
        """For the table."""
        if not self.step:
            return {}
        stages = sorted({span.action.stage for mine in self.step for span in mine})
        rows = [[span for mine in self.step for span in mine if span.action.stage == stage] for stage in stages]
        lines = [f"stage {stage} |{line}|" for stage, line in zip(stages, schedules.draw(rows), strict=True)]
        seconds = schedules.length(self.step)
        split = any(span.action.kind == "W" for mine in self.step for span in mine)
        capitals = " (capital: of the weights)" if split else ""
        words = f"{seconds * 1e3:.2f} ms; digit: forward of that microbatch, letter: backward{capitals}, dot: waiting"
        return {
            "ideal bubble": f"{self.ideal:.1%}  (equal stages, messages that take no time)",
            "idle share": "  ".join(f"process {process}: {share:.1%}" for process, share in enumerate(self.idle)),
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
        return {"ideal_bubble": self.ideal, "idle_share": self.idle, "timeline": timeline}
