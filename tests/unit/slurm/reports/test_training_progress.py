"""Speed and loss of a run, read from its newest metric rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.runs.folder import RunFolder
from slurm.reports.training_progress import measure_speed, read_training_progress


def make_rows(first: int, last: int, time: float, **values: Any) -> list[dict[str, Any]]:
    """Return the rows of the steps from `first` to `last`, each of 0.5 s and 8 samples. `time` is the first time."""
    rows = []
    for step in range(first, last + 1):
        row = {"global_step": step, "samples": 8 * step, "time": time + 0.5 * (step - first), "loss": 1 / step}
        rows.append(row | {"step_time": 0.5} | values)
    return rows


def write_rows(attempt: RunFolder, rows: list[dict[str, Any]]) -> None:
    attempt.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_time_of_an_evaluation_does_not_lower_the_speed() -> None:
    rows = make_rows(1, 5, 0.0) + make_rows(6, 10, 60.0)
    assert measure_speed(rows) == 16.0


def test_an_attempt_that_only_repeated_an_evaluation_has_the_loss_of_the_previous_one(tmp_path: Path) -> None:
    first = RunFolder(tmp_path).claim_attempt()
    first.record_parent_attempt(None, 0)
    write_rows(first, make_rows(1, 4, 0.0))
    second = RunFolder(tmp_path).claim_attempt()
    second.record_parent_attempt(1, 4)
    write_rows(second, [{"global_step": 4, "samples": 32, "time": 9.0, "test_loss": 0.5}])
    progress = read_training_progress(RunFolder(tmp_path), 16.0, is_finished=True)
    assert (progress.step, progress.loss) == (4, 0.25)


def test_the_loss_of_a_long_row_is_found(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path).claim_attempt()
    attempt.record_parent_attempt(None, 0)
    write_rows(attempt, make_rows(1, 4, 0.0, **{f"value{number}": 0.123456789 for number in range(300)}))
    progress = read_training_progress(RunFolder(tmp_path), 16.0, is_finished=True)
    assert (progress.step, progress.loss) == (4, 0.25)
