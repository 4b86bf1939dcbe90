"""Tables of the fault suite: the outcome of each disturbed run, on the screen and in the record."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

from common.runs.folder import read_json, write_json
from tests.benchmarks.measure import summarize_values
from tests.benchmarks.records import RESULTS, Cell, Record, Row, Table
from tests.cluster.lab import CHECKPOINT_STEPS, STEPS


@dataclasses.dataclass
class Struck:
    """The outcome of a disturbed run."""

    fault: str
    experiment: str
    step: int
    """The step at which the fault struck."""
    detected: float | None = None
    """Seconds until SLURM no longer showed the job as running; for the time limit, since the run was slowed."""
    resumed: float | None = None
    """Seconds until a new attempt had loaded a checkpoint; for an elastic run, until it had taken another step."""
    redone: int | None = None
    """Steps that were trained again."""
    starts: int = 0
    equal: bool = False
    problems: list[str] = dataclasses.field(default_factory=list)
    folder: str = ""
    total: float = 0.0


HEAD = "| fault | experiment | detected after (s) | resumed after (s) | steps repeated | equal |\n"


def table(lines: list[str]) -> str:
    """Return a Markdown table."""
    return HEAD + "| --- | --- | --- | --- | --- | --- |\n" + "".join(f"{line}\n" for line in lines)


def line(row: Struck) -> str:
    """Return a run's line of the table."""
    detected = "-" if row.detected is None else f"{row.detected:.1f}"
    resumed = "-" if row.resumed is None else f"{row.resumed:.1f}"
    equal = "yes"
    if not row.equal:
        equal = "NO: " + "; ".join(row.problems).replace("\n", " ")[:300]
    return f"| {row.fault} | {row.experiment} | {detected} | {resumed} | {format_redone(row)} | {equal} |"


def format_redone(row: Struck) -> str:
    """Return the number of repeated steps, or "-" if it is unknown."""
    return "-" if row.redone is None else str(row.redone)


@dataclasses.dataclass(frozen=True)
class FaultRecord:
    """The record of a plan of faults, which an interrupted command continues."""

    seed: str
    rounds: int
    names: tuple[str, ...] = ()
    """Names of the faults, or empty for all."""
    elastic: bool = False

    @property
    def name(self) -> str:
        return "elastic_faults" if self.elastic else "faults"

    @property
    def file(self) -> Path:
        """File that contains every run."""
        return RESULTS / f"{self.name}.json"

    @property
    def plan(self) -> dict[str, object]:
        """Settings that must be equal for a plan to be continued."""
        settings = {"seed": self.seed, "rounds": self.rounds, "names": list(self.names)}
        return settings | {"steps": STEPS, "every": CHECKPOINT_STEPS, "commit": Record().commit}

    @property
    def command(self) -> str:
        """The command that executes the plan."""
        options = ["--elastic"] if self.elastic else []
        options += [f"--rounds={self.rounds}", f"--seed={self.seed}"]
        if self.names:
            options += ["--only", *self.names]
        return shlex.join(["python", "-m", "tests.cluster.faults", *options])

    def load(self) -> list[Struck]:
        """Return the runs of this plan that an interrupted command has recorded at this commit."""
        facts = read_json(self.file)
        rows = facts.pop("rows", [])
        is_same_plan = facts == self.plan and Record().is_resumable
        return [Struck(**row) for row in rows] if is_same_plan else []

    def save(self, rows: list[Struck]) -> None:
        """Write every run, and the table of all faults so far into the record of this machine and day."""
        RESULTS.mkdir(exist_ok=True)
        write_json(self.file, self.plan | {"rows": [dataclasses.asdict(row) for row in rows]})
        rounds = min(map(len, group_by_fault(rows).values()))
        about = {"title": self.name.replace("_", " "), "command": self.command, "rounds": rounds}
        Record().put_table(f"cluster/{self.name}", about, summarize_elastic(rows) if self.elastic else summarize(rows))


def group_by_fault(rows: list[Struck]) -> dict[str, list[Struck]]:
    """Return the runs of each fault, in their order."""
    groups: dict[str, list[Struck]] = {}
    for row in rows:
        groups.setdefault(row.fault, []).append(row)
    return groups


def count_equal(rows: list[Struck]) -> str:
    """Return how many of the runs ended as the undisturbed one."""
    return f"{sum(row.equal for row in rows)} of {len(rows)}"


def summarize(rows: list[Struck]) -> Table:
    """Return a table with one line per fault."""
    lines = []
    for fault, runs in group_by_fault(rows).items():
        experiments = ", ".join(sorted({row.experiment for row in runs}))
        times = [summarize_times(runs, name) for name in ("detected", "resumed")]
        redone = ", ".join(map(format_redone, runs))
        lines.append(Row(fault, [experiments, *times, redone, count_equal(runs)]))
    heads = ("experiments", "detected after (s)", "resumed after (s)", "steps repeated", "bit-identical result")
    return Table(("fault", *heads), lines)


def summarize_elastic(rows: list[Struck]) -> Table:
    """Return a table of elastic runs with one line per fault."""
    lines = []
    for fault, runs in group_by_fault(rows).items():
        attempts = ", ".join(str(row.starts) for row in runs)
        lines.append(Row(fault, [summarize_times(runs, "resumed"), attempts, count_equal(runs)]))
    return Table(("fault", "resumed after (s)", "attempts", "losses equal to within 1e-9"), lines)


def summarize_times(rows: list[Struck], name: str) -> Cell:
    """Return the median of the times `name` with the lowest and the highest one, or "-" if none was measured."""
    seconds = [getattr(row, name) for row in rows if getattr(row, name) is not None]
    return summarize_values(seconds) if seconds else "-"
