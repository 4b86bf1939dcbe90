"""The result of a run as result.json holds it: one set of names for all experiments. Imports no torch.

format         2; files without it are of format 1, which had names of its own in each experiment
state          finished, failed, cancelled or preempted; with exit_status and, unless finished, reason and last_step
data           the data set that was really used
scores         of the last evaluation: test_loss (mean over samples), test_accuracy (0 to 1), test_samples
timings        samples_per_second and step_seconds (mean), first steps and evaluations left out
memory         peak bytes, by rank, or by device where one rank uses several
outcome        values of the technique that only the training decides: a repetition gives the same to the bit
measured       values of the technique that each run measures anew: times, shares of time, memory, paths
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from common.runs.folder import Folder, write_json, write_json_once
from common.runs.metrics_writer import replace_nonfinite

FORMAT = 2
GROUPS = ("scores", "timings", "outcome", "measured")
Values = Mapping[str, Any]


class Report(Protocol):
    """Report of a technique at the end of a run: rows of the table, and values of the result."""

    def rows(self) -> Mapping[str, str]: ...

    def result(self) -> Facts: ...


@dataclass(frozen=True)
class Facts:
    """Report of given values: rows of the table, and the `outcome`, `measured` and `memory` that the result gets."""

    shown: Mapping[str, str] = field(default_factory=dict)
    outcome: Values = field(default_factory=dict)
    measured: Values = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)

    def rows(self) -> Mapping[str, str]:
        return self.shown

    def result(self) -> Facts:
        return self


@dataclass(frozen=True)
class Result:
    """State and final numbers of a run; groups are empty where it has none."""

    state: str = ""
    exit_status: int | None = None
    reason: str = ""
    last_step: int | None = None
    data: str = ""
    scores: Values = field(default_factory=dict)
    timings: Values = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    outcome: Values = field(default_factory=dict)
    measured: Values = field(default_factory=dict)

    def with_reports(self, reports: Iterable[Facts]) -> Result:
        """Return this result with the values of reports; the memory of a report replaces that of the ranks."""
        outcome, measured, memory = dict(self.outcome), dict(self.measured), self.memory
        for facts in reports:
            outcome |= facts.outcome
            measured |= facts.measured
            memory = facts.memory or memory
        return replace(self, outcome=outcome, measured=measured, memory=memory)

    def select_filled_fields(self) -> dict[str, Any]:
        """Return the fields that have a value."""
        return {name: value for name, value in vars(self).items() if value not in (None, "", {})}

    def flatten_values(self) -> dict[str, Any]:
        """Return every value under its own name, whatever group it belongs to; memory as a group."""
        found: dict[str, Any] = {}
        for name, value in self.select_filled_fields().items():
            found |= value if name in GROUPS else {name: value}
        return found

    def select_repeatable(self) -> dict[str, Any]:
        """Return the values that a repetition of the run gives again to the bit."""
        return dict(self.scores) | dict(self.outcome) | {"data": self.data}

    def find_number(self, name: str) -> float | None:
        """Return a value by its name, if it is a finite number."""
        return to_number(self.flatten_values().get(name))

    def compute_waiting_share(self) -> float | None:
        """Return the share of the time (0 to 1) that ranks wait for each other, idle in a pipeline or in communication.

        None where a run measured neither.
        """
        each = self.measured.get("idle_share")
        if isinstance(each, list) and each and None not in [to_number(one) for one in each]:
            return float(sum(each) / len(each))
        sent, exposed, step = map(self.find_number, ("communication_seconds", "communication_exposed", "step_seconds"))
        return None if sent is None or exposed is None or not step else sent * exposed / step

    def format_partition(self) -> str | None:
        """Return the layers that begin a stage; None for a run without stages, or with one."""
        stages = self.measured.get("stages")
        if not isinstance(stages, list) or not all(isinstance(names, list) and names for names in stages):
            return None
        return ",".join(str(names[0]) for names in stages[1:]) or None

    def format_shards(self) -> str | None:
        """Return the samples that each rank has of a batch at the end; None for a run with equal shards."""
        try:
            return "+".join(str(int(count)) for count in self.measured["shards"][-1][1])
        except (LookupError, TypeError, ValueError):
            return None

    def find_peak_mb(self) -> float | None:
        """Return the highest peak of a rank or device, in MB (1e6 bytes)."""
        found = [one / 1e6 for one in map(to_number, self.memory.values()) if one is not None]
        return max(found, default=None)

    def list_columns(self) -> dict[str, Any]:
        """Return the single numbers and words, for tables and the W&B summary; of a list one column for each item."""
        found = {name: value for name, value in self.flatten_values().items() if isinstance(value, int | float | str)}
        for name, value in (self.flatten_values() | {"peak_memory": list(self.memory.values())}).items():
            if isinstance(value, list) and all(isinstance(one, int | float) for one in value):
                found |= {f"{name}_{number}": one for number, one in enumerate(value)}
        more = {"waiting": self.compute_waiting_share(), "memory_mb": self.find_peak_mb()}
        return found | {name: value for name, value in more.items() if value is not None}

    def write(self, folder: Folder) -> None:
        """Write result.json, with null for NaN and infinite numbers. Raises UserError."""
        write_json(folder.path / "result.json", self._to_content())

    def write_unless_there(self, folder: Folder) -> bool:
        """Write result.json where the run has none; return whether it was written. Raises UserError."""
        return write_json_once(folder.path / "result.json", self._to_content())

    def _to_content(self) -> dict[str, Any]:
        content: dict[str, Any] = {"format": FORMAT}
        for name, value in self.select_filled_fields().items():
            content[name] = replace_nonfinite(value) if isinstance(value, Mapping) else value
        return content


def to_number(value: Any) -> float | None:
    """Return a finite number as it is; None for anything else."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def parse_result(content: Values) -> Result:
    """Return the result in the content of a result.json; damaged parts are left out.

    Of a format that is not known here only the state is read, and the reason then says so.
    """
    unknown = describe_unknown_format(content)
    if unknown:
        return Result(str(content.get("state", "")), reason=unknown)
    if content.get("format") != FORMAT:
        return parse_format_1(content)
    sound = {name: value for name, value in content.items() if name in vars(Result())}
    groups = {*GROUPS, "memory"}
    return Result(**{k: v for k, v in sound.items() if k not in groups or isinstance(v, Mapping)})


def describe_unknown_format(content: Values) -> str:
    """Return one line about a format that this version does not read; empty for one that it does."""
    if content.get("format", 1) in (1, FORMAT):
        return ""
    told = f"result.json has format {str(content['format'])[:20]}"
    return f"{told}, and this version of the code reads up to {FORMAT}: use the one that wrote it"


# ---- format 1: everything under one level, under names that experiments chose

SCORES = ("test_loss", "test_accuracy", "test_samples")
TIMINGS = ("samples_per_second", "step_seconds")
GENERAL = ("state", "exit_status", "reason", "last_step", "data")
RENAMED = {"alone_step_seconds": "single_rank_step_seconds", "training_memory": "training_bytes"}
MEASURED_1 = {
    *("idle_share", "timeline", "stages"),
    *("ranks", "straggler", "communication_seconds", "communication_exposed", "alone_step_seconds", "efficiency"),
    *("imbalance", "compare", "training_memory"),
    *("fp32_seconds", "bf16_seconds", "csr_seconds", "fp16_seconds", "two_of_four_seconds"),
    *("export", "export_bytes", "export_difference", "export_problem"),
}


def parse_format_1(content: Values) -> Result:
    """Return the result of a run that was made before format 2."""
    general = {name: content[name] for name in GENERAL if name in content}
    if not isinstance(general.get("reason", ""), str):
        del general["reason"]
    peaks, megabytes = content.get("peak_memory"), content.get("memory_megabytes")
    memory: dict[str, int] = {}
    if isinstance(peaks, Mapping):
        memory = {str(name).replace("process ", "rank "): held for name, held in peaks.items()}
    elif to_number(peaks) is not None:
        memory = {"rank 0": int(peaks)}  # type: ignore[arg-type]
    if isinstance(megabytes, list):
        memory = {f"rank {number}": int(held * 1e6) for number, held in enumerate(megabytes) if to_number(held)}
    known = {*GENERAL, *SCORES, *TIMINGS, "peak_memory", "memory_megabytes", "format"}
    columns = {f"{name}_{number}" for name in ("idle_share", "peak_memory") for number in range(64)}
    rest = {name: value for name, value in content.items() if name not in known | columns}
    measured = {RENAMED.get(name, name): value for name, value in rest.items() if name in MEASURED_1}
    return Result(
        **general,
        scores={name: content[name] for name in SCORES if name in content},
        timings={name: content[name] for name in TIMINGS if name in content},
        memory=memory,
        outcome={name: value for name, value in rest.items() if name not in MEASURED_1},
        measured=measured,
    )
