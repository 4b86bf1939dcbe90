"""Values of training steps on their way from the ranks that know them to metrics.jsonl, which rank 0 writes."""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.rendezvous import World
from common.runs.metrics_writer import MetricsWriter

MEAN = -1
"""As the source of values: every rank has its own, of its shard of the batch, and their means are written."""
TAG = 1 << 20  # of messages; above every tag of the pipeline
Values = dict[str, Tensor | float | None]


class Batches(Protocol):
    """What counts the samples of steps."""

    @property
    def steps(self) -> int: ...

    def count_samples(self, steps: int) -> int: ...


def stack(values: list[Any]) -> Tensor:
    """Values of several steps as one tensor in float64: those of a GPU are fetched at once."""
    tensors = all(isinstance(value, Tensor) for value in values)
    return torch.stack(values).double() if tensors else torch.tensor(values, dtype=torch.float64)


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
        self.names: list[str] = []  # of all values so far, in one order on all ranks whose values count
        self.next_flush = 1
        self.diverged = ""
        """On rank 0, why the loss is no finite number any more; empty as long as it is one."""

    def add(self, step: int, now: float, values: Values) -> None:
        """Keep the values of a step until the next flush; names may differ from step to step."""
        self.rows.append((step, now, values))

    @property
    def due(self) -> bool:
        """Whether to flush now; the same on all ranks whose values travel."""
        return bool(self.rows) and self.rows[-1][0] >= self.next_flush

    def flush(self) -> None:
        """Write the collected rows. All ranks call it after the same step."""
        if not self.rows:
            return
        rows, self.rows = self.rows, []
        step, now = rows[-1][0], rows[-1][1]
        # when to flush next is decided by `source` and travels with the values, so that both ends agree
        count = int(len(rows) * self.seconds / max(now - self.flushed, 1e-6))
        self.flushed = now
        self.next_flush = step + min(max(1, count), 4 * len(rows))
        if self.world.rank not in (0, self.source) and not self.averaged:
            self.next_flush = sys.maxsize
            return
        knows = self.world.rank == self.source or self.averaged
        values, there = self._bring_to_main([values for _, _, values in rows] if knows else [{}] * len(rows))
        if not self.world.is_main:
            return
        columns = dict(zip(self.names, values.tolist(), strict=True))
        known = dict(zip(self.names, there.tolist(), strict=True))
        self._look_for_divergence([row[0] for row in rows], columns, known)
        self.writer.add(
            self._head(s, t) | {name: column[at] for name, column in columns.items() if known[name][at]}
            for at, (s, t, _) in enumerate(rows)
        )
        self.show(step, {name: column[-1] for name, column in columns.items() if known[name][-1]})

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write values that rank 0 knows, such as an evaluation's, behind those of the steps. All ranks call it."""
        self.flush()
        if self.world.is_main:
            self.writer.add([self._head(step, time.perf_counter()) | values])

    def _head(self, step: int, now: float) -> dict[str, Any]:
        return {"global_step": step, "samples": self.batches.count_samples(step), "time": round(now - self.began, 6)}

    def _bring_to_main(self, given: Sequence[Values]) -> tuple[Tensor, Tensor]:
        """The values of all names in each row, and where there are any: two tables [names, rows].

        Both ends must know the same names before a table can travel: a name that is new to one of them costs another
        message.
        """
        while True:
            table = torch.zeros(2 * len(self.names) + 2, len(given), dtype=torch.float64)
            for i, name in enumerate(self.names):
                at = [n for n, row in enumerate(given) if row.get(name) is not None]
                if at:
                    table[i, at] = stack([given[n][name] for n in at])
                    table[len(self.names) + i, at] = 1
            new = list(dict.fromkeys(name for row in given for name in row if name not in self.names))
            table[-2] = len(new)
            table[-1] = self.next_flush if self.world.rank == self.source else 0
            table = self._average(table) if self.averaged else self._send_to_main(table)
            unknown, following = table[-2:, 0].tolist()
            if not unknown:
                if self.averaged or self.world.is_main:
                    self.next_flush = int(following)
                return table[: len(self.names)], table[len(self.names) : -2] > 0
            self.names += self._share_names(new)

    def _share_names(self, new: list[str]) -> list[str]:
        """The names that are new to any rank whose values count, the same everywhere."""
        if self.averaged:
            gathered = self.world.gather(new)
            names: list[str] = self.world.broadcast(list(dict.fromkeys(n for names in gathered for n in names)))
            return names
        text = torch.tensor(list(json.dumps(new).encode()), dtype=torch.uint8)
        size = self._send_to_main(torch.tensor([float(len(text))]))
        if self.world.rank != self.source:
            text = torch.zeros(int(size), dtype=torch.uint8)
        return list(json.loads(bytes(self._send_to_main(text).tolist())))

    def _average(self, table: Tensor) -> Tensor:
        """The means over the ranks that have a value, added in their order whatever the number of rows.

        What follows the values (where there are any, new names, `source`'s own last row) is added up.
        """
        table = table.to(self.world.device)
        tables = [torch.empty_like(table) for _ in range(self.world.size)]
        dist.all_gather(tables, table)
        count = len(self.names)
        ranks = functools.reduce(torch.add, (one[count : 2 * count] for one in tables)).clamp(min=1)
        for one in tables:
            one[:count] /= ranks
        return functools.reduce(torch.add, tables).cpu()

    def _send_to_main(self, table: Tensor) -> Tensor:
        if self.source == 0:
            return table
        table = table.to(self.world.device)
        if self.world.rank == self.source:
            dist.send(table, 0, tag=TAG)
        else:
            dist.recv(table, self.source, tag=TAG)
        return table.cpu()

    def _look_for_divergence(
        self, steps: list[int], columns: dict[str, list[float]], known: dict[str, list[bool]]
    ) -> None:
        """Note the first step whose loss is no finite number, and which samples it was given.

        A step that was `skipped` has harmed nothing: its gradients were too large for fp16.
        """
        losses = columns.get("loss", [])
        skipped = columns.get("skipped", [0.0] * len(losses))
        wrong = (i for i, loss in enumerate(losses) if known["loss"][i] and not math.isfinite(loss) and not skipped[i])
        at = next(wrong, None)
        if at is None or self.diverged:
            return
        epoch = (steps[at] - 1) // self.batches.steps
        start = self.batches.count_samples(epoch * self.batches.steps)
        first, after = (self.batches.count_samples(step) - start for step in (steps[at] - 1, steps[at]))
        self.diverged = (
            f"the loss of step {steps[at]} is {columns['loss'][at]} (epoch {epoch}, positions {first} to "
            f"{after - 1} of its order); lower optim.lr, or set clip where there is one"
        )
