"""A log of the values of training steps, such as the loss.

Rank 0 gathers the values from the ranks that know them, and writes the values to metrics.jsonl.
"""

from __future__ import annotations

import functools
import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from common.ranks.ranks import Ranks
from common.runs.metrics_writer import MetricsWriter
from common.runs.run_progress import RunProgress

MEAN = -1
"""Value of the argument `source` if every rank knows the values of its own shard and the log writes the means."""
Values = dict[str, Tensor | float | None]
"""Values of one step by name. A value is None on a rank that does not know the value."""
AUTOMATIC_FIELDS = ("global_step", "samples", "time", "learning_rate", "step_time", "samples_per_second")
"""Fields of a row of metrics.jsonl that the script does not log."""


class LoggedStep(NamedTuple):
    """A step whose values have not been written yet."""

    number: int
    end: float
    """End of the step, as a value of time.perf_counter()."""
    values: Values
    learning_rate: float | None
    """None in a measurement."""
    seconds: float | None
    """Duration of the step, or None if it is unknown."""


class SampleCounter(Protocol):
    """The interface of a loader that provides the steps per epoch and the sample counts."""

    @property
    def steps(self) -> int: ...

    def count_samples(self, steps: int) -> int: ...


def list_value_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the distinct names of all values in the rows, in order of first occurrence."""
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row)
    return list(names)


def fetch_values(rows: Sequence[Values]) -> list[dict[str, float]]:
    """Convert the values of several steps to numbers, and omit values that are None.

    Values with the same name are transferred from the GPU together, so that the CPU waits only once for each name.
    """
    fetched: list[dict[str, float]] = [{} for _ in rows]
    for name in list_value_names(rows):
        # Collect the values with this name, and the rows of the result to which the values belong.
        numbers: list[Any] = []
        targets: list[dict[str, float]] = []
        for row, target in zip(rows, fetched, strict=True):
            if row.get(name) is not None:
                numbers.append(row[name])
                targets.append(target)

        if numbers and all(isinstance(number, Tensor) for number in numbers):
            numbers = torch.stack(numbers).tolist()
        for target, number in zip(targets, numbers, strict=True):
            target[name] = float(number)
    return fetched


def average_over_ranks(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each value over the ranks that know the value.

    `rows[r]` contains the values of rank r in one step.
    """
    means: dict[str, float] = {}
    for name in list_value_names(rows):
        values = [row[name] for row in rows if name in row]
        parts = [value / len(values) for value in values]
        means[name] = functools.reduce(operator.add, parts)  # sum() would round differently since Python 3.12
    return means


def is_evaluation(row: dict[str, Any]) -> bool:
    """Return whether a row of metrics.jsonl contains the values of an evaluation."""
    return "test_loss" in row


def get_row_position(row: dict[str, Any]) -> tuple[int, bool]:
    """Return the sort key of a row of metrics.jsonl.

    The row of a training step comes before the row of the evaluation after the same step.
    """
    return row["global_step"], is_evaluation(row)


class MetricsLog:
    """A log that collects the values of steps, and writes them in batches.

    The values are written to metrics.jsonl about every `seconds` seconds. Adding values does not synchronize ranks or
    devices. `source` is the rank that knows the values, or MEAN. For example, only the rank of the last stage of a
    pipeline knows the loss. `batches` is the loader, which counts the samples of each step. All ranks must add values
    after the same steps and flush after the same steps.
    """

    def __init__(
        self,
        ranks: Ranks,
        writer: MetricsWriter,
        batches: SampleCounter,
        *,
        source: int = MEAN,
        seconds: float = 0.5,
        progress: RunProgress | None = None,
        custom_loss: str = "",
        show: Callable[[int, dict[str, float]], None] = lambda step, newest: None,
    ) -> None:
        """Create a metrics log.

        The times in metrics.jsonl are relative to the start of the run, which `progress` knows. After every flush, rank
        0 calls `show` with the number and the values of the newest step. `custom_loss` is the name of the user's
        function that computes the loss, or an empty string.
        """
        self.ranks = ranks
        self.writer = writer
        self.batches = batches
        self.seconds = seconds
        self.custom_loss = custom_loss
        self.show = show
        self.is_averaged = source == MEAN
        self.source = max(0, source)
        self.last_flush = time.perf_counter()
        self.progress = progress or RunProgress()
        self.steps: list[LoggedStep] = []
        self.next_flush = 1
        """Step after which the next flush is due."""
        self.divergence = ""
        """On rank 0, a message that training has diverged, or an empty string."""

    def add_step(
        self, step: int, now: float, values: Values, learning_rate: float | None = None, seconds: float | None = None
    ) -> None:
        """Store the values of a step until the next flush.

        `now` is the current value of time.perf_counter(). The names of the values may differ between steps. The
        learning rate and the duration of the step in `seconds` are those of rank 0.
        """
        self.steps.append(LoggedStep(step, now, values, learning_rate, seconds))

    @property
    def is_flush_due(self) -> bool:
        """True if the log should be flushed after the newest step.

        The value is the same on all ranks.
        """
        return bool(self.steps) and self.steps[-1].number >= self.next_flush

    def flush(self) -> None:
        """Write the values of all steps since the last flush.

        All ranks must call this method after the same step.
        """
        if not self.steps:
            return
        steps = self.steps
        self.steps = []

        newest = steps[-1]
        interval = self._choose_interval(len(steps), newest.end)
        local_values = fetch_values([step.values for step in steps])
        gathered = self.ranks.current.all_gather([local_values, interval])
        self.next_flush = newest.number + gathered[self.source][1]  # all ranks use the interval of the same rank
        if not self.ranks.current.is_main:
            return

        step_values = gathered[self.source][0]
        if self.is_averaged:
            by_rank = [rank_values for rank_values, _ in gathered]
            step_values = [average_over_ranks(values) for values in zip(*by_rank, strict=True)]
        self._record_divergence([step.number for step in steps], step_values)
        self.writer.add_rows(map(self._make_row, steps, step_values))
        self.show(newest.number, step_values[-1])

    def _choose_interval(self, count: int, now: float) -> int:
        """Return the number of steps until the next flush, at most 4 * count.

        `count` is the number of steps since the previous flush. The duration of these steps determines the interval.
        """
        interval = int(count * self.seconds / max(now - self.last_flush, 1e-6))
        self.last_flush = now
        return min(max(1, interval), 4 * count)

    def drop_unwritten_rows(self) -> None:
        """Do nothing. The subclass SharedMetricsLog discards the rows that rank 0 has written."""

    def write_values(self, step: int, values: dict[str, float]) -> None:
        """Flush the log, and write a row with `values`, such as test scores.

        All ranks must call this method. The values of rank 0 are written.
        """
        self.flush()
        if self.ranks.current.is_main:
            self.writer.add_rows([self._make_position_fields(step, time.perf_counter()) | values])

    def _make_position_fields(self, step: int, now: float) -> dict[str, Any]:
        """Return the fields that every row has: step, number of samples, and time in seconds."""
        return {
            "global_step": step,
            "samples": self.batches.count_samples(step),
            "time": round(now - self.progress.start_time, 6),
        }

    def _make_row(self, step: LoggedStep, values: dict[str, float]) -> dict[str, Any]:
        """Return the row of metrics.jsonl for a step. Values that the script logs override the automatic fields."""
        row = self._make_position_fields(step.number, step.end)
        if step.learning_rate is not None:
            row["learning_rate"] = step.learning_rate
        if step.seconds:
            samples = row["samples"] - self.batches.count_samples(step.number - 1)
            row["step_time"] = round(step.seconds, 7)
            row["samples_per_second"] = round(samples / step.seconds, 2)
        return row | values

    def _record_divergence(self, steps: Sequence[int], rows: Sequence[dict[str, float]]) -> None:
        """Store a message about the first step whose loss is NaN or infinite.

        A step that was skipped because its gradients are too large for fp16 does not count as divergence.
        """
        for step, row in zip(steps, rows, strict=True):
            if self.divergence or math.isfinite(row.get("loss", 0.0)) or row.get("skipped"):
                continue
            # Convert the sample counts of the run to positions within the epoch.
            epoch = (step - 1) // self.batches.steps
            epoch_start = self.batches.count_samples(epoch * self.batches.steps)
            first = self.batches.count_samples(step - 1) - epoch_start
            last = self.batches.count_samples(step) - epoch_start - 1
            self.divergence = (
                f"the loss of step {step} is {row['loss']} (samples at positions {first} to {last} of epoch {epoch}); "
                "lower optim.lr, or set clip if the experiment has this setting"
            )
            if self.custom_loss:
                self.divergence += f"; if the custom loss {self.custom_loss} can return NaN or infinity, correct it"


class SharedMetricsLog(MetricsLog):
    """A log of values that are equal on all ranks, for elastic runs.

    A flush needs no communication. Each rank keeps the rows that rank 0 may not have written yet, so that another rank
    can continue the metrics file if rank 0 is lost.
    """

    unwritten_rows: list[dict[str, Any]]
    """Rows that rank 0 may not have written yet."""
    last_written: tuple[int, bool] = (0, True)
    """Sort key (see `get_row_position`) of the last row that rank 0 has written."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.unwritten_rows = []

    def collect_unwritten_rows(self) -> list[dict[str, Any]]:
        """Return all rows that rank 0 may not have written yet, including the newest steps."""
        steps = self.steps
        self.steps = []
        step_values = fetch_values([step.values for step in steps])
        self.unwritten_rows += map(self._make_row, steps, step_values)
        return self.unwritten_rows

    def replace_unwritten_rows(self, rows: list[dict[str, Any]], step: int) -> None:
        """Replace the rows by those of another rank, which has completed `step` steps."""
        self.steps = []
        self.unwritten_rows = rows
        self.next_flush = step + 1

    def flush(self) -> None:
        """Write the values of all steps since the last flush on rank 0, without communication."""
        if self.steps:
            newest = self.steps[-1]
            self.next_flush = newest.number + self._choose_interval(len(self.steps), newest.end)
        self.write_rows(self.collect_unwritten_rows())

    def write_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write the rows that are not in metrics.jsonl yet, on rank 0 only.

        Rows that are already in metrics.jsonl, for example because an evaluation was repeated, are skipped.
        """
        if not self.ranks.current.is_main:
            return
        new_rows = []
        for row in rows:
            position = get_row_position(row)
            if position > self.last_written:
                new_rows.append(row)
                self.last_written = position

        step_rows = [row for row in new_rows if not is_evaluation(row)]
        self._record_divergence([row["global_step"] for row in step_rows], step_rows)
        if new_rows:
            self.writer.add_rows(new_rows)
        if step_rows:
            last_row = step_rows[-1]
            logged = {name: value for name, value in last_row.items() if name not in AUTOMATIC_FIELDS}
            self.show(last_row["global_step"], logged)

    def drop_unwritten_rows(self) -> None:
        """Discard the stored rows, unless rank 0 cannot write them, for example because the disk is full.

        All ranks must call this method after the same flush.
        """
        if not self.ranks.current.broadcast(bool(self.writer.buffered_lines)):
            self.unwritten_rows = []

    def write_values(self, step: int, values: dict[str, float]) -> None:
        """Flush the log, and write a row with the values of an evaluation.

        `values` must be equal on all ranks. If the evaluation is repeated, the values are written only once.
        """
        self.flush()
        row = self._make_position_fields(step, time.perf_counter()) | values
        self.unwritten_rows.append(row)
        self.write_rows([row])

    def take_over_metrics_file(self) -> None:
        """Prepare the new rank 0 to continue the metrics file of the previous rank 0.

        Call this method on the new rank 0 after the previous rank 0 was lost. An incomplete last line of the file is
        removed.
        """
        rows = self.writer.continue_file()
        self.last_written = max(map(get_row_position, rows), default=(0, True))
