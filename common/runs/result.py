"""The result of a run, as stored in result.json. The names are the same for all experiments.

format         2, the only format that this version reads
state          finished, failed, cancelled or preempted; stored together with exit_status
reason         why the run did not finish, as text for the user; stored together with last_step
cause          why a run failed, as a `Cause`; results of older versions contain no cause
data           name of the data set that was actually used
scores         values of the last evaluation: test_loss (mean over samples), test_samples and, if the targets are class
               labels, test_accuracy (0 to 1); for text, bits_per_byte
timings        samples_per_second and step_seconds (means), excluding the first steps and evaluations
memory         peak memory in bytes by rank, or by device if one rank uses several devices
outcome        values of the technique that depend only on the training; a rerun reproduces these values exactly
measured       values of the technique that differ between reruns: times, shares of time, memory, and paths

This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from common.runs.folder import RunFolder, write_json, write_json_once
from common.runs.metrics_writer import replace_nonfinite
from common.system import foreign_text
from common.system.causes import Cause

FORMAT = 2
GROUPS = ("scores", "timings", "outcome", "measured")
Values = Mapping[str, Any]


class Report(Protocol):
    """Report that a training technique creates at the end of a run.

    A report adds rows to the final table and values to result.json.
    """

    def rows(self) -> Mapping[str, str]:
        """Write the plots of the report, if any, and return its rows of the final table."""

    def result(self) -> ReportData:
        """Return the values of the report for result.json."""


@dataclass(frozen=True)
class ReportData:
    """Report with fixed content.

    `shown` contains rows of the final table. `outcome`, `measured` and `memory` are values for result.json.
    """

    shown: Mapping[str, str] = field(default_factory=dict)
    outcome: Values = field(default_factory=dict)
    measured: Values = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)

    def rows(self) -> Mapping[str, str]:
        return self.shown

    def result(self) -> ReportData:
        return self


@dataclass(frozen=True)
class Result:
    """State and final numbers of a run. Groups without values are empty."""

    state: str = ""
    exit_status: int | None = None
    reason: str = ""
    last_step: int | None = None
    cause: Cause | None = None
    data: str = ""
    scores: Values = field(default_factory=dict)
    timings: Values = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    outcome: Values = field(default_factory=dict)
    measured: Values = field(default_factory=dict)

    def with_reports(self, reports: Iterable[ReportData]) -> Result:
        """Return this result with the values of reports added.

        If a report contains memory values, they replace the peak memory of the ranks.
        """
        outcome = dict(self.outcome)
        measured = dict(self.measured)
        memory = self.memory
        for facts in reports:
            outcome |= facts.outcome
            measured |= facts.measured
            memory = facts.memory or memory
        return replace(self, outcome=outcome, measured=measured, memory=memory)

    def select_filled_fields(self) -> dict[str, Any]:
        """Return the fields that are not empty, by name."""
        return {name: content for name, content in vars(self).items() if content not in (None, "", {})}

    def flatten_values(self) -> dict[str, Any]:
        """Return the values of all groups in one dict. The group `memory` is not flattened."""
        flat: dict[str, Any] = {}
        for name, content in self.select_filled_fields().items():
            flat |= content if name in GROUPS else {name: content}
        return flat

    def select_repeatable(self) -> dict[str, Any]:
        """Return the values that a rerun reproduces exactly."""
        return dict(self.scores) | dict(self.outcome) | {"data": self.data}

    def find_number(self, name: str) -> float | None:
        """Return the value with this name if it is a finite number, or None otherwise."""
        return to_finite_number(self.flatten_values().get(name))

    def compute_waiting_share(self) -> float | None:
        """Return the share of time (0 to 1) that ranks spend waiting.

        Ranks wait while they are idle in a pipeline, or for communication that does not overlap with computation.
        Returns None if the run measured neither idle time nor communication time.
        """
        idle_shares = self.measured.get("idle_share")
        if isinstance(idle_shares, list) and idle_shares and None not in map(to_finite_number, idle_shares):
            return float(sum(idle_shares) / len(idle_shares))

        communication = self.find_number("communication_seconds")
        exposed_share = self.find_number("communication_exposed")
        step_seconds = self.find_number("step_seconds")
        if communication is None or exposed_share is None or not step_seconds:
            return None
        return communication * exposed_share / step_seconds

    def format_partition(self) -> str | None:
        """Return the name of the first layer of each pipeline stage except stage 0, separated by commas.

        Returns None if the run has only one stage.
        """
        stages = self.measured.get("stages")
        if not isinstance(stages, list) or not all(isinstance(names, list) and names for names in stages):
            return None
        return ",".join(str(names[0]) for names in stages[1:]) or None

    def format_shards(self) -> str | None:
        """Return the number of samples of each rank in the last batch, as in `40+24`.

        Returns None if all shards are equal.
        """
        try:
            counts = self.measured["shards"][-1][1]
            return "+".join(str(int(count)) for count in counts)
        except (LookupError, TypeError, ValueError):
            return None

    def find_peak_mb(self) -> float | None:
        """Return the highest peak memory of any rank or device, in MB (1e6 bytes)."""
        peaks = map(to_finite_number, self.memory.values())
        return max((peak / 1e6 for peak in peaks if peak is not None), default=None)

    def write(self, folder: RunFolder) -> None:
        """Write result.json, with null in place of NaN and infinity. Raises UserError if writing fails."""
        write_json(folder.path / "result.json", self._to_content())

    def write_once(self, folder: RunFolder) -> bool:
        """Write result.json if the file does not exist, and return whether it was written.

        Raises UserError if writing fails.
        """
        return write_json_once(folder.path / "result.json", self._to_content())

    def _to_content(self) -> dict[str, Any]:
        content: dict[str, Any] = {"format": FORMAT}
        for name, field_value in self.select_filled_fields().items():
            content[name] = replace_nonfinite(field_value) if isinstance(field_value, Mapping) else field_value
        return content


def to_finite_number(value: Any) -> float | None:
    """Return a finite number as a float, or None for any other value."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def parse_result(content: Values) -> Result:
    """Convert the content of result.json to a Result. Damaged parts are skipped.

    If the format is unknown, only the state is read, and `reason` names the format.
    """
    format_problem = describe_unknown_format(content)
    if format_problem:
        return Result(str(content.get("state", "")), reason=format_problem)
    fields = {name: content[name] for name in vars(Result()) if name in content}
    for group in (*GROUPS, "memory"):
        if not isinstance(fields.get(group), Mapping):
            fields.pop(group, None)
    if "cause" in fields:
        fields["cause"] = read_cause(content)
    return Result(**fields)


def read_cause(content: Values) -> Cause:
    """Return the cause in the content of result.json.

    If the result of a failed run contains no cause, the run is of an older version. The cause then follows from the
    reason.
    """
    if content.get("state") == "failed" and "cause" not in content:
        return foreign_text.classify_recorded_text(str(content.get("reason") or ""))
    try:
        return Cause(content.get("cause", Cause.OTHER))
    except ValueError:  # a newer version may distinguish more causes
        return Cause.OTHER


def describe_unknown_format(content: Values) -> str:
    """Return a one-line message if this version cannot read the format of result.json.

    Returns an empty string for a supported format.
    """
    if content.get("format", FORMAT) == FORMAT:
        return ""
    version = str(content["format"])[:20]
    return f"result.json has format {version}, but this version reads format {FORMAT}; use the version that wrote it"
