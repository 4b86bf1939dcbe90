"""Log of values of training steps: gathered from the ranks that know them, written to metrics.jsonl by rank 0."""

from __future__ import annotations

import functools
import json
import math
import operator
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from common.distributed.rendezvous import World
from common.runs.metrics_writer import MetricsWriter

MEAN = -1
"""Source of values that every rank has for its shard of the batch; their means are written."""
Values = dict[str, Tensor | float | None]
POSITION_FIELDS = ("global_step", "samples", "time")


class Batches(Protocol):
    """The loader, as far as the log uses it."""

    @property
    def steps(self) -> int: ...

    def count_samples(self, steps: int) -> int: ...


def list_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the values in all rows, in the order of their first occurrence."""
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row)
    return list(names)


def fetch_values(rows: Sequence[Values]) -> list[dict[str, float]]:
    """Return the values of several steps as numbers, without None; a GPU is read once for each name."""
    fetched: list[dict[str, float]] = [{} for _ in rows]
    for name in list_names(rows):
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
    """Return the mean of each value of a step over the ranks that have it.

    `rows[r]` are the values of rank r.
    """
    means: dict[str, float] = {}
    for name in list_names(rows):
        values = [row[name] for row in rows if name in row]
        parts = [value / len(values) for value in values]
        means[name] = functools.reduce(operator.add, parts)  # sum() rounds differently since Python 3.12
    return means


def is_evaluation(row: dict[str, Any]) -> bool:
    """Return whether a row of metrics has the values of an evaluation."""
    return "test_loss" in row


def locate_row(row: dict[str, Any]) -> tuple[int, bool]:
    """Return the position of a row in metrics.jsonl: the row of a step comes before its evaluation."""
    return row["global_step"], is_evaluation(row)


class MetricsLog:
    """Collects values without synchronisation and writes them in batches, about `seconds` apart.

    `source` is the rank that knows the values (a pipeline's last stage knows the loss), or MEAN. `batches` counts the
    samples of steps. All ranks add values after the same steps and flush after the same ones.
    """

    def __init__(
        self,
        world: World,
        writer: MetricsWriter,
        batches: Batches,
        *,
        source: int = MEAN,
        seconds: float = 0.5,
        start_time: float | None = None,
        show: Callable[[int, dict[str, float]], None] = lambda step, newest: None,
    ) -> None:
        """`began` is the origin of times, by time.perf_counter(); rank 0 calls `show` after every flush."""
        self.world = world
        self.writer = writer
        self.batches = batches
        self.seconds = seconds
        self.show = show
        self.is_averaged = source == MEAN
        self.source = max(0, source)
        self.last_flush = time.perf_counter()
        self.start_time = self.last_flush if start_time is None else start_time
        self.rows: list[tuple[int, float, Values]] = []
        self.next_flush = 1
        """Step of the next flush."""
        self.divergence = ""
        """On rank 0, the reason why training has diverged, or empty."""

    def add(self, step: int, now: float, values: Values) -> None:
        """Store the values of a step until the next flush; names may differ between steps."""
        self.rows.append((step, now, values))

    @property
    def is_due(self) -> bool:
        """True when it is time to flush; the same on all ranks."""
        return bool(self.rows) and self.rows[-1][0] >= self.next_flush

    def flush(self) -> None:
        """Write the collected rows. All ranks call it after the same step."""
        if not self.rows:
            return
        rows = self.rows
        self.rows = []
        step, now, _ = rows[-1]
        interval = self._choose_interval(len(rows), now)
        local_values = fetch_values([values for _, _, values in rows])
        gathered = self.world.all_gather([local_values, interval])
        self.next_flush = step + gathered[self.source][1]  # one rank decides, so that all agree
        if not self.world.is_main:
            return
        step_values = gathered[self.source][0]
        if self.is_averaged:
            by_rank = [rank_values for rank_values, _ in gathered]
            step_values = [average_over_ranks(values) for values in zip(*by_rank, strict=True)]
        self._note_divergence([row[0] for row in rows], step_values)
        self.writer.add(self._make_rows(rows, step_values))
        self.show(step, step_values[-1])

    def _choose_interval(self, count: int, now: float) -> int:
        """Return the steps until the next flush, after `count` steps; they grow at most fourfold."""
        interval = int(count * self.seconds / max(now - self.last_flush, 1e-6))
        self.last_flush = now
        return min(max(1, interval), 4 * count)

    def drop_unwritten_rows(self) -> None:
        """Note that all ranks have reached the last flush of rank 0."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write values that rank 0 knows, such as those of an evaluation, after those of the steps.

        All ranks call it.
        """
        self.flush()
        if self.world.is_main:
            self.writer.add([self._make_row(step, time.perf_counter()) | values])

    def _make_row(self, step: int, now: float) -> dict[str, Any]:
        return {
            "global_step": step,
            "samples": self.batches.count_samples(step),
            "time": round(now - self.start_time, 6),
        }

    def _make_rows(
        self, rows: Sequence[tuple[int, float, Values]], step_values: Sequence[dict[str, float]]
    ) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl for collected steps, whose values are `step_values`."""
        return [self._make_row(step, now) | values for (step, now, _), values in zip(rows, step_values, strict=True)]

    def _note_divergence(self, steps: Sequence[int], rows: Sequence[dict[str, float]]) -> None:
        """Note the first step whose loss is NaN or infinite, and its samples.

        A `skipped` step has not diverged: its gradients were too large for fp16.
        """
        for step, row in zip(steps, rows, strict=True):
            if self.divergence or math.isfinite(row.get("loss", 0.0)) or row.get("skipped"):
                continue
            epoch = (step - 1) // self.batches.steps
            epoch_start = self.batches.count_samples(epoch * self.batches.steps)
            first = self.batches.count_samples(step - 1) - epoch_start
            last = self.batches.count_samples(step) - epoch_start - 1
            self.divergence = (
                f"the loss of step {step} is {row['loss']} (epoch {epoch}, positions {first} to {last} of its "
                "order); lower optim.lr, or set clip where there is one"
            )


class SharedMetricsLog(MetricsLog):
    """Log of values that are equal on all ranks.

    Any rank can continue the file if rank 0 is lost. A flush needs no other rank. Each rank keeps the rows that rank 0
    may not have written.
    """

    unwritten_rows: list[dict[str, Any]]
    """Rows that rank 0 may not have written."""
    last_written: tuple[int, bool] = (0, True)
    """Position of the last row that rank 0 has written: its step, and whether it is an evaluation."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.unwritten_rows = []

    def collect(self) -> list[dict[str, Any]]:
        """Return the rows that rank 0 may not have written, including those of the newest steps."""
        rows = self.rows
        self.rows = []
        step_values = fetch_values([values for _, _, values in rows])
        self.unwritten_rows += self._make_rows(rows, step_values)
        return self.unwritten_rows

    def flush(self) -> None:
        """Write the collected rows."""
        if self.rows:
            step, now, _ = self.rows[-1]
            self.next_flush = step + self._choose_interval(len(self.rows), now)
        self.write_rows(self.collect())

    def write_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write, on rank 0, the rows that have not been written yet. An evaluation may have been repeated."""
        if not self.world.is_main:
            return
        new_rows = []
        for row in rows:
            position = locate_row(row)
            if position > self.last_written:
                new_rows.append(row)
                self.last_written = position
        step_rows = [row for row in new_rows if not is_evaluation(row)]
        self._note_divergence([row["global_step"] for row in step_rows], step_rows)
        if new_rows:
            self.writer.add(new_rows)
        if step_rows:
            last_row = step_rows[-1]
            logged = {name: value for name, value in last_row.items() if name not in POSITION_FIELDS}
            self.show(last_row["global_step"], logged)

    def drop_unwritten_rows(self) -> None:
        """Drop the kept rows: rank 0 wrote them before all ranks voted."""
        self.unwritten_rows = []

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write the values of an evaluation, which all ranks know, once, also if the evaluation is repeated."""
        self.flush()
        row = self._make_row(step, time.perf_counter()) | values
        self.unwritten_rows.append(row)
        self.write_rows([row])

    def take_over_file(self) -> None:
        """Continue the file of a lost rank 0 on a new one; removes an incomplete last line."""
        path = self.writer.file
        content = path.read_bytes() if path.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]
        if complete != content:
            os.truncate(path, len(complete))
        rows = [json.loads(line) for line in complete.splitlines()]
        self.writer.written = len(rows)
        self.last_written = max(map(locate_row, rows), default=(0, True))
