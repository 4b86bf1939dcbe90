"""Steps, speed and loss of a run, read from its first and last metric rows. This module does not import torch."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from common.runs.folder import RunFolder, read_json
from common.runs.metrics_rows import is_row, parse_json
from common.runs.result import to_finite_number
from common.system.text import read_end_of_file

Rows = list[dict[str, Any]]
SPEED_BYTES = 1 << 16  # number of bytes read from the end of the metrics to measure the speed
LAST_ROW_BYTES = 1 << 12  # number of bytes read from the end of the metrics to find the last step
SPEED_STEPS = 50  # number of newest steps over which the speed is measured


@dataclass(frozen=True)
class TrainingProgress:
    """Progress of a run according to its metrics."""

    step: int
    """Last step of the run, or 0 before the first step."""
    total_steps: int | None
    """Number of steps of the whole run, or None if unknown."""
    samples_per_second: float
    """Speed over the last steps, or 0 if it is unknown."""
    loss: float | None
    """Loss of the last step, or None if unknown."""
    seconds_left: float | None
    """Estimated time until the last step, or None if unknown."""


def read_training_progress(folder: RunFolder, final_speed: float | None, *, is_finished: bool) -> TrainingProgress:
    """Read the progress of a run. `final_speed` is the speed in the result of the run, if any."""
    attempts = [attempt for attempt, _ in folder.trace_attempts()]  # the newest attempt comes first
    # Finding the last step requires fewer rows than measuring the speed.
    rows = read_last_metrics_rows(attempts, LAST_ROW_BYTES if final_speed else SPEED_BYTES)
    speed = final_speed or measure_speed(rows)
    if not speed and is_finished:  # the newest attempt had too few steps
        speed = measure_speed(read_last_metrics_rows(attempts[1:], SPEED_BYTES))
    total_steps = read_total_steps(attempts)
    losses = [to_finite_number(row["loss"]) for row in rows if "loss" in row]
    if not losses:  # the newest attempt has only repeated an evaluation
        first_step = find_last_step(attempts, [])
        earlier_rows = [row for row in read_last_metrics_rows(attempts[1:], SPEED_BYTES) if "loss" in row]
        losses = [to_finite_number(row["loss"]) for row in earlier_rows if row["global_step"] <= first_step]
    return TrainingProgress(
        find_last_step(attempts, rows),
        total_steps,
        speed,
        losses[-1] if losses else None,
        estimate_seconds_left(attempts, rows, total_steps),
    )


def read_last_metrics_rows(attempts: list[RunFolder], size: int) -> Rows:
    """Return the metric rows in the last `size` bytes of the first attempt's metrics.jsonl.

    Truncated and malformed rows are skipped. If all rows are longer than `size`, at least SPEED_BYTES are read. Returns
    an empty list if `attempts` is empty.
    """
    parsed = []
    for attempt in attempts[:1]:
        parsed = [parse_json(line) for line in read_end_of_file(attempt.metrics_file, size).splitlines()]
    rows = [row for row in parsed if is_row(row)]
    if parsed and not rows and size < SPEED_BYTES:
        return read_last_metrics_rows(attempts, SPEED_BYTES)
    return rows


def read_first_metrics_row(attempt: RunFolder) -> dict[str, Any] | None:
    """Return the first metric row of an attempt, or None if it is missing or damaged."""
    with contextlib.suppress(OSError), open(attempt.metrics_file, errors="replace") as file:
        row = parse_json(file.readline(LAST_ROW_BYTES))
        return row if is_row(row) else None
    return None


def measure_speed(rows: Rows) -> float:
    """Return the samples per second over the last SPEED_STEPS training rows, excluding evaluations and checkpoints.

    Returns 0 if there are fewer than two training rows.
    """
    steps = [row for row in rows if "loss" in row][-SPEED_STEPS:]
    if len(steps) < 2:
        return 0.0
    durations = [to_finite_number(row.get("step_time")) for row in steps[1:]]
    seconds = sum(duration for duration in durations if duration is not None)
    if None in durations:  # not all steps were timed
        seconds = steps[-1]["time"] - steps[0]["time"]
    samples = steps[-1]["samples"] - steps[0]["samples"]
    return float(samples / seconds) if seconds > 0 else 0.0


def find_last_step(attempts: list[RunFolder], rows: Rows) -> int:
    """Return the last step of a run, or 0 before the first step.

    The last step is the highest step in `rows` or, if higher, the step from which the newest attempt resumed.
    """
    steps = [row["global_step"] for row in rows]
    steps += [attempt.parent_record[1] for attempt in attempts[:1] if attempt.parent_record]
    return max(steps, default=0)


def read_last_step(folder: RunFolder) -> int:
    """Return the last step in the metrics of a run.

    Heartbeats are not used, because the metrics may contain later steps than the newest heartbeats.
    """
    attempts = [attempt for attempt, _ in folder.trace_attempts()]
    return find_last_step(attempts, read_last_metrics_rows(attempts, LAST_ROW_BYTES))


def read_total_steps(attempts: list[RunFolder]) -> int | None:
    """Return the total number of steps that the newest attempt has recorded.

    Returns None if no attempt has started to train, or if an older version of this project has started it.
    """
    for attempt in attempts[:1]:
        total = read_json(attempt.attempt_folder / "attempt.json").get("total_steps")
        return total if isinstance(total, int) else None
    return None


def estimate_seconds_left(attempts: list[RunFolder], rows: Rows, total_steps: int | None) -> float | None:
    """Return the estimated time until the last step of a run, or None if it is unknown.

    The estimate uses the mean time per step in the newest attempt, including evaluations and checkpoints.
    """
    first = read_first_metrics_row(attempts[0]) if attempts else None
    if first is None or not rows or total_steps is None:
        return None
    steps = rows[-1]["global_step"] - first["global_step"]
    start = to_finite_number(first.get("time"))
    end = to_finite_number(rows[-1].get("time"))
    if start is None or end is None or steps <= 0:
        return None
    return max(0.0, (end - start) / steps * (total_steps - rows[-1]["global_step"]))
