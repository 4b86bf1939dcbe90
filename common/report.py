"""What a run says at its end: a table of its numbers, and what a pipeline's processes did when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

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
    """The share of a step that each process waits, the median over steps; `steps[i][p]` are the spans of process p.

    A step lasts from the first start to the last end over all processes.
    """
    shares: list[list[float]] = [[] for _ in steps[0]]
    for step in steps:
        wall = max(s.end for mine in step for s in mine) - min(s.start for mine in step for s in mine)
        for process, mine in enumerate(step):
            shares[process].append(1 - sum(s.end - s.start for s in mine) / wall)
    return [median(values) for values in shares]


def typical(steps: Sequence[Sequence[Sequence[Span]]]) -> Sequence[Sequence[Span]]:
    """The step of median length."""

    def length(step: Sequence[Sequence[Span]]) -> float:
        return max(s.end for mine in step for s in mine) - min(s.start for mine in step for s in mine)

    return sorted(steps, key=length)[len(steps) // 2]


def pipeline_rows(gathered: Sequence[Sequence[Sequence[Span]]], plan: Schedule, stages: int) -> dict[str, str]:
    """Bubble and timeline of a pipeline out of every process's kept steps, `gathered[p][i]`."""
    steps = list(zip(*gathered, strict=True))
    idle = idle_shares(steps)
    ideal = schedules.idle_share(schedules.play(plan, stages))
    step = typical(steps)
    width = max(s.end for mine in step for s in mine) - min(s.start for mine in step for s in mine)
    lines = [f"process {process} |{line}|" for process, line in enumerate(schedules.draw(step))]
    return {
        "ideal bubble": f"{ideal:.1%}  (equal stages, messages that take no time)",
        "idle share": "  ".join(f"process {process}: {share:.1%}" for process, share in enumerate(idle)),
        "one step": "\n".join([f"{width * 1e3:.2f} ms; digit: forward of that microbatch, letter: backward", *lines]),
    }
