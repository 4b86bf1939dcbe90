"""Log of the values of training steps: collected from the ranks that know them, written to metrics.jsonl by rank 0."""

from __future__ import annotations

import functools
import json
import math
import operator
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from common.distributed.rendezvous import World
from common.runs.metrics_writer import MetricsWriter

MEAN = -1
"""As the source of values: every rank has its own, of its shard of the batch, and their means are written."""
Values = dict[str, Tensor | float | None]
POSITION_FIELDS = ("global_step", "samples", "time")


class Batches(Protocol):
    """The loader, of which only the counts are used."""

    @property
    def steps(self) -> int: ...

    def count_samples(self, steps: int) -> int: ...


def fetch_values(rows: Sequence[Values]) -> list[dict[str, float]]:
    """Return the values of several steps as numbers, without None; those of a GPU are fetched at once."""
    found: list[dict[str, float]] = [{} for _ in rows]
    for name in dict.fromkeys(name for row in rows for name in row):
        given: dict[int, Any] = {at: row[name] for at, row in enumerate(rows) if row.get(name) is not None}
        numbers = list(given.values())
        if numbers and all(isinstance(value, Tensor) for value in numbers):
            numbers = torch.stack(numbers).tolist()
        for at, value in zip(given, numbers, strict=True):
            found[at][name] = float(value)
    return found


def average_over_ranks(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each value of a step over the ranks that have it; `rows[r]` are the values of rank r."""
    means = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        parts = [value / len(values) for value in values]
        means[name] = functools.reduce(operator.add, parts)  # sum() rounds in another way from Python 3.12 on
    return means


def is_evaluation(row: dict[str, Any]) -> bool:
    """Return whether a row of metrics has the values of an evaluation."""
    return "test_loss" in row


def locate_row(row: dict[str, Any]) -> tuple[int, bool]:
    """Return the position of a row in metrics.jsonl: the row of a step comes before its evaluation."""
    return row["global_step"], is_evaluation(row)


class MetricsLog:
    """Collects unsynchronised values and writes them in batches about `seconds` apart.

    `source` is the rank that knows the values (a pipeline's last stage knows the loss), or MEAN. `batches` count the
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
        began: float | None = None,
        show: Callable[[int, dict[str, float]], None] = lambda step, newest: None,
    ) -> None:
        """`began` is what times are counted from, by time.perf_counter(); rank 0 calls `show` after every flush."""
        self.world, self.writer, self.batches, self.seconds, self.show = world, writer, batches, seconds, show
        self.averaged, self.source = source == MEAN, max(0, source)
        self.flushed = time.perf_counter()
        self.began = self.flushed if began is None else began
        self.rows: list[tuple[int, float, Values]] = []
        self.next_flush = 1
        self.diverged = ""
        """On rank 0, why the loss is no finite number any more; empty as long as it is one."""

    def add(self, step: int, now: float, values: Values) -> None:
        """Keep the values of a step until the next flush; names may differ from step to step."""
        self.rows.append((step, now, values))

    @property
    def is_due(self) -> bool:
        """True when it is time to flush; the same on all ranks."""
        return bool(self.rows) and self.rows[-1][0] >= self.next_flush

    def flush(self) -> None:
        """Write the collected rows. All ranks call it after the same step."""
        if not self.rows:
            return
        rows, self.rows = self.rows, []
        step, now = rows[-1][:2]
        count = int(len(rows) * self.seconds / max(now - self.flushed, 1e-6))
        self.flushed = now
        own = fetch_values([values for _, _, values in rows])
        gathered = self.world.all_gather([own, min(max(1, count), 4 * len(rows))])
        self.next_flush = step + gathered[self.source][1]  # decided by one rank, so that all agree
        if not self.world.is_main:
            return
        found = gathered[self.source][0]
        if self.averaged:
            found = [average_over_ranks(values) for values in zip(*(values for values, _ in gathered), strict=True)]
        self._note_divergence([row[0] for row in rows], found)
        self.writer.add(self._make_row(s, t) | values for (s, t, _), values in zip(rows, found, strict=True))
        self.show(step, found[-1])

    def drop_kept_rows(self) -> None:
        """Note that all ranks have come to where rank 0 has flushed."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write values that rank 0 knows, such as an evaluation's, behind those of the steps. All ranks call it."""
        self.flush()
        if self.world.is_main:
            self.writer.add([self._make_row(step, time.perf_counter()) | values])

    def _make_row(self, step: int, now: float) -> dict[str, Any]:
        return {"global_step": step, "samples": self.batches.count_samples(step), "time": round(now - self.began, 6)}

    def _note_divergence(self, steps: Sequence[int], rows: Sequence[dict[str, float]]) -> None:
        """Note the first step whose loss is no finite number, and which samples it was given.

        A step that was `skipped` has harmed nothing: its gradients were too large for fp16.
        """
        for step, row in zip(steps, rows, strict=True):
            if self.diverged or math.isfinite(row.get("loss", 0.0)) or row.get("skipped"):
                continue
            epoch = (step - 1) // self.batches.steps
            start = self.batches.count_samples(epoch * self.batches.steps)
            first, after = (self.batches.count_samples(n) - start for n in (step - 1, step))
            self.diverged = (
                f"the loss of step {step} is {row['loss']} (epoch {epoch}, positions {first} to {after - 1} of its "
                "order); lower optim.lr, or set clip where there is one"
            )


class SharedMetricsLog(MetricsLog):
    """Log of values that are equal on all ranks, so that any rank can go on writing where rank 0 is lost.

    A flush needs no other rank. Each keeps the rows that rank 0 may not have written.
    """

    kept: list[dict[str, Any]]
    newest: tuple[int, bool] = (0, True)
    """Position of the newest row that rank 0 has written: its step, and whether it is an evaluation."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.kept = []

    def collect(self) -> list[dict[str, Any]]:
        """Return the rows that rank 0 may not have written, the newest ones included."""
        rows, self.rows = self.rows, []
        values = fetch_values([values for _, _, values in rows])
        self.kept += [self._make_row(step, now) | found for (step, now, _), found in zip(rows, values, strict=True)]
        return self.kept

    def flush(self) -> None:
        """Write the collected rows."""
        if self.rows:
            (step, now, _), count = self.rows[-1], len(self.rows)
            wanted = int(count * self.seconds / max(now - self.flushed, 1e-6))
            self.flushed, self.next_flush = now, step + min(max(1, wanted), 4 * count)
        self.write_rows(self.collect())

    def write_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write, on rank 0, the rows that are not written yet. An evaluation may have been repeated."""
        if not self.world.is_main:
            return
        new_rows = []
        for row in rows:
            position = locate_row(row)
            if position > self.newest:
                new_rows.append(row)
                self.newest = position
        steps = [row for row in new_rows if not is_evaluation(row)]
        self._note_divergence([row["global_step"] for row in steps], steps)
        if new_rows:
            self.writer.add(new_rows)
        if steps:
            logged = {name: value for name, value in steps[-1].items() if name not in POSITION_FIELDS}
            self.show(steps[-1]["global_step"], logged)

    def drop_kept_rows(self) -> None:
        """Drop the rows kept: rank 0 had written them before all ranks voted."""
        self.kept = []

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write the values of an evaluation, which all ranks know, once, also if the evaluation is repeated."""
        self.flush()
        row = self._make_row(step, time.perf_counter()) | values
        self.kept.append(row)
        self.write_rows([row])

    def take_over_file(self) -> None:
        """Go on, on a new rank 0, behind the rows that the lost one has written; a line cut off is removed."""
        content = self.writer.file.read_bytes() if self.writer.file.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]
        if complete != content:
            os.truncate(self.writer.file, len(complete))
        rows = [json.loads(line) for line in complete.splitlines()]
        self.writer.written = len(rows)
        self.newest = max(map(locate_row, rows), default=(0, True))
