"""Tables of the fault suite: what became of each disturbed run, on the screen and in the record."""

from __future__ import annotations

import dataclasses
import json

from tests.benchmarks.records import RESULTS, Record, Row, Table
from tests.cluster.lab import EVERY, STEPS


@dataclasses.dataclass
class Struck:
    """What became of a disturbed run."""

    fault: str
    experiment: str
    step: int
    """At which it was struck."""
    detected: float | None = None
    """Seconds until SLURM no longer showed the job as running; of the time limit, since the run was slowed."""
    resumed: float | None = None
    """Seconds until a new start had loaded a checkpoint; of an elastic run, until a step was done after the blow."""
    redone: int | None = None
    """Steps that were trained again."""
    starts: int = 0
    equal: bool = False
    problems: list[str] = dataclasses.field(default_factory=list)
    folder: str = ""
    total: float = 0.0


HEAD = "| fault | experiment | detected after (s) | resumed after (s) | steps redone | equal |\n"


def table(lines: list[str]) -> str:
    """Markdown."""
    return HEAD + "| --- | --- | --- | --- | --- | --- |\n" + "".join(f"{line}\n" for line in lines)


def line(row: Struck) -> str:
    """A run's line of the table."""
    times = ["-" if value is None else f"{value:.1f}" for value in (row.detected, row.resumed)]
    redone = "-" if row.redone is None else str(row.redone)
    words = "yes" if row.equal else "NO: " + "; ".join(row.problems).replace("\n", " ")[:300]
    return f"| {row.fault} | {row.experiment} | {times[0]} | {times[1]} | {redone} | {words} |"


def save(rows: list[Struck], seed: str, rounds: int, *, elastic: bool = False) -> None:
    """Write every run, and the table of all faults into the record of this machine and day."""
    RESULTS.mkdir(exist_ok=True)
    name, option = ("elastic_faults", " --elastic") if elastic else ("faults", "")
    facts = {"seed": seed, "steps": STEPS, "every": EVERY, "rows": [dataclasses.asdict(row) for row in rows]}
    (RESULTS / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
    command = f"python -m tests.cluster.faults{option} --rounds={rounds} --seed={seed}"
    about = {"title": name.replace("_", " "), "command": command, "rounds": rounds}
    Record().put_table(f"cluster/{name}", about, summarize_elastic(rows) if elastic else summary(rows))


def summary(rows: list[Struck]) -> Table:
    """One line a fault."""
    lines = []
    for fault in dict.fromkeys(row.fault for row in rows):
        mine = [row for row in rows if row.fault == fault]
        redone = ", ".join("-" if row.redone is None else str(row.redone) for row in mine)
        cells = [", ".join(row.experiment for row in mine), *(spread(mine, name) for name in ("detected", "resumed"))]
        lines.append(Row(fault, [*cells, redone, f"{sum(row.equal for row in mine)} of {len(mine)}"]))
    times = ("detected after (s)", "resumed after (s)")
    return Table(("fault", "experiment of each round", *times, "steps redone", "equal to the bit"), lines)


def summarize_elastic(rows: list[Struck]) -> Table:
    """One line a fault, of elastic runs."""
    lines = []
    for fault in dict.fromkeys(row.fault for row in rows):
        mine = [row for row in rows if row.fault == fault]
        cells = [spread(mine, "resumed"), ", ".join(str(row.starts) for row in mine)]
        lines.append(Row(fault, [*cells, f"{sum(row.equal for row in mine)} of {len(mine)}"]))
    return Table(("fault", "resumed after (s)", "attempts", "equal to 1e-9"), lines)


def spread(rows: list[Struck], name: str) -> str:
    """The least and the most of a time."""
    values = sorted(value for row in rows if (value := getattr(row, name)) is not None)
    return " to ".join(dict.fromkeys(f"{value:.1f}" for value in (*values[:1], *values[-1:]))) or "-"
