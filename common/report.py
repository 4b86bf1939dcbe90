"""What a run says at its end: a table of its numbers, and what a pipeline's processes did when."""

from __future__ import annotations

import contextlib
import importlib.util
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from common import plots, schedules
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


def forget_peak(device: torch.device) -> None:
    """Let peak_memory begin anew, where the system can (Linux: proc_pid_clear_refs(5))."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held: of tensors on a GPU, else of everything in it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
        plots.timeline(path, {f"stage {n}": spans for n, spans in self.by_stage.items()}, title)
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
