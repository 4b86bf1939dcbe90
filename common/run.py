"""The one object that an experiment talks to: folder, logger, metrics, progress, profile, result."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common import config, profile
from common.checkpoint import Checkpoints
from common.config import UserError
from common.folder import Folder, read_json, write_json
from common.launch import World
from common.preemption import Left, Notice, SafePoints
from common.prepare import Prepared
from common.rows import Rows, finite
from common.screen import Screen
from common.training import Training
from configs.shared import Experiment

WARM_UP = 10  # steps left out of the throughput, of a short run a third
HEARTBEAT = 5.0  # seconds
METRICS_TAG = 1 << 20  # above every tag of the pipeline


class Run:
    """What one process of a run uses for everything that is not the method.

    `source` is the rank that knows the values given to `log` (a pipeline's last stage knows the loss);
    rank 0 writes them. With `averaged` all ranks give values and their means are written (each rank has the
    loss of its share of the batch). The experiment sets these, and `total`, before the first step.
    """

    def __init__(
        self, settings: Experiment, folder: Folder, world: World, prepared: Prepared, notice: Notice | None = None
    ) -> None:
        self.settings, self.folder, self.world, self.prepared = settings, folder, world, prepared
        self.source, self.averaged, self.total = 0, False, 0
        self.screen = Screen(settings.log, silent=not world.is_main)
        self.logger = self._logger()
        self.rows: list[tuple[int, float, dict[str, Tensor | float | None]]] = []
        self.next_flush = 1
        self.durations: list[float] = []
        self.last = 0  # the newest step
        self.mark: float | None = None
        self.began = self.flushed = time.perf_counter()
        self.beat = 0.0
        self.profiler = profile.begin(settings.profile, folder.attempt / f"trace-{world.rank}.json", self.say)
        self.notice = notice or Notice(settings.checkpoint.grace, sys.stderr)
        self.points = SafePoints(world, settings.checkpoint, self.notice)
        self.checkpoints = Checkpoints(folder, world, settings.checkpoint, self.say)
        self.training: Training | None = None
        self.diverged = ""
        self.memory: dict[str, int] = {}  # of each process, the most bytes it has held
        self.before_backward: Callable[[], float | None] = lambda: None  # seconds of a step, where they are measured
        self.best: float | None = None  # what `checkpoint.best` names, in the best evaluation so far
        self.metrics = Rows(folder.metrics_file, lambda text: self.say(text, logging.WARNING))
        if world.is_main:
            write_json(folder.attempt / "world.json", self._world())

    def _world(self) -> dict[str, Any]:
        """Where this attempt runs, for meta.json."""
        world, cuda = self.world, self.world.device.type == "cuda"
        return {
            "processes": world.size,
            "nodes": world.nodes,
            "hosts": list(world.hosts),
            "launched_by": world.how,
            "backend": world.backend,
            "device": torch.cuda.get_device_name(world.device) if cuda else "cpu",
            "cuda": torch.version.cuda if cuda else None,
            "threads": world.threads,
            "rendezvous_seconds": round(world.seconds, 3),
        }

    # ---- words

    def _logger(self) -> logging.Logger:
        logging.raiseExceptions = False  # a log on a full disk takes no words, which is told of by what matters more
        logger = logging.getLogger("run")
        logger.setLevel(logging.DEBUG)
        handler: logging.Handler = logging.FileHandler(self.folder.log_file(self.world.rank))
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        return logger

    def say(self, text: str, level: int = logging.INFO) -> None:
        """To this rank's log file and, on rank 0 from log.level up, to the screen."""
        self.logger.log(level, text)
        if level >= logging.getLevelName(self.settings.log.level.upper()):
            self.screen.line(text)

    def note(self, error: BaseException | str) -> None:
        """Write into this rank's log when and why it failed."""
        plain = isinstance(error, str | UserError)
        words = str(error) if plain else f"{type(error).__name__}: {error}"
        self.logger.error("after step %d: %s", self.last, words, exc_info=None if plain else error)  # type: ignore[arg-type]

    # ---- going on where an earlier start of this run ended

    def resume(self, training: Training) -> int:
        """Load the newest checkpoint of the run, if there is one; returns the steps done. All ranks call it."""
        self.training = training
        loaded = self.checkpoints.load()
        step, parent, rows = 0, None, 0
        if loaded is not None:
            training.load(loaded)
            step, parent, rows = loaded.step, loaded.attempt, int(loaded.common["rows"])
            self.began -= loaded.common["seconds"]
            self.best = loaded.common["best"]
            self.say(f"goes on after step {step}, saved by attempt {parent}")
        if self.world.is_main:
            self.folder.set_parent(parent, step, rows)
        self.points.begin(step)
        self._watch()
        return step

    def safe_point(self, step: int, *, now: bool = False) -> None:
        """Between two steps: save if it is time; if any rank was told to stop, save and leave. All ranks call it.

        Raises Left after saving, and UserError when the loss is no number any more or nothing could be saved.
        """
        if not now and not self.points.reached(step):
            return
        self.flush()
        wanted = self.points.agree(step, bool(self.diverged))
        self._watch()
        if wanted.diverged:
            raise UserError(self.world.broadcast(self.diverged))  # the same words, whoever is heard first
        if now and step >= self.total:  # nothing is left but the result
            return
        saved = wanted.save and self._save(step)
        self.mark = time.perf_counter()  # the time since the last step was no training
        if wanted.leave and not saved:
            raise UserError(f"told to stop after step {step}, and it could not be saved, as told above")
        if wanted.leave:
            self.say(f"told to stop: saved after step {step}, to be continued")
            raise Left

    def _save(self, step: int, *, best: bool = False) -> bool:
        assert self.training is not None, "resume comes before the first step"
        if self.world.broadcast(bool(self.metrics.waiting)):  # the next start would miss these rows
            self.say(f"WARNING: no checkpoint of step {step}: the disk does not even take its metrics", logging.WARNING)
            return False
        state = self.training.state()
        finite = all(bool(value.isfinite().all()) for value in state.model.values())
        if not self.world.broadcast(all(self.world.gather(finite))):
            raise UserError(f"a parameter is no finite number after step {step}; lower optim.lr")
        wandb = read_json(self.folder.path / "wandb" / "id.json").get("id")
        state.common |= {"rows": self.metrics.written, "seconds": time.perf_counter() - self.began, "wandb": wandb}
        state.common["best"] = self.best
        return self.checkpoints.save(step, state, best=best)

    def _save_best(self, step: int, values: dict[str, float]) -> None:
        """Keep the state of an evaluation that is the best so far. All ranks call it."""
        name = self.settings.checkpoint.best
        value = self.world.broadcast(values.get(name)) if name != "none" else None
        if value is None:
            return
        if self.best is None or (value > self.best if name == "test_accuracy" else value < self.best):
            self.best = value
            self._save(step, best=True)

    def _watch(self) -> None:
        """A step that takes nearly as long as it may leaves its stacks in the log."""
        self.notice.watch(0.9 * self.settings.launch.step_timeout)

    # ---- numbers

    def log(self, step: int, **values: Tensor | float | None) -> None:
        """Values of one training step, tensors unsynchronised; all ranks call it after every step, counted from 1.

        The values come from the rank `source` (elsewhere they may be None) and reach the disk, then W&B, in batches
        about `log.seconds` apart.
        """
        self._wait(step)
        now = time.perf_counter()
        if self.mark is not None:
            self.durations.append(now - self.mark)
        self.mark, self.last = now, step
        self.rows.append((step, now, values))
        if step >= self.next_flush:
            self.flush()
        if now - self.beat > HEARTBEAT:
            self.beat = now
            with contextlib.suppress(UserError):  # a full disk is told of by what matters more
                self.folder.heartbeat(self.world.rank, step, time.time(), self.before_backward())
        if self.profiler is not None:
            self.profiler.step()

    def _wait(self, step: int) -> None:
        """Wait for the GPUs where the steady steps begin and where something else follows a step.

        A step only gives them work: without it short runs would take as long as giving, and what is left of it would
        count as an evaluation's or a checkpoint's.
        """
        if self.training is None or not self.training.gpus:
            return
        done = len(self.durations) + (self.mark is not None)  # steps of this start
        steady = done == min(WARM_UP, (done + self.total - step) // 3)
        ends = step == self.total or step % self.training.loader.steps == 0
        if steady or ends or self.points.reached(step):
            for gpu in self.training.gpus:
                torch.cuda.synchronize(gpu)

    def flush(self) -> None:
        """Bring the collected rows to rank 0 and to the disk. All ranks call it at the same step."""
        if not self.rows:
            return
        rows, self.rows = self.rows, []
        step, now, names = rows[-1][0], rows[-1][1], list(rows[0][2])
        # when to flush next is decided by `source` and travels with the values, so that both ends agree
        count = int(len(rows) * self.settings.log.seconds / max(now - self.flushed, 1e-6))
        self.flushed = now
        self.next_flush = step + min(max(1, count), 4 * len(rows))
        if self.world.rank not in (0, self.source) and not self.averaged:
            self.next_flush = sys.maxsize
            return
        table = torch.zeros(len(names) + 1, len(rows), dtype=torch.float64)
        if self.world.rank == self.source or self.averaged:
            for i, name in enumerate(names):
                column = [row[2][name] for row in rows]
                whole = torch.stack(column) if isinstance(column[0], Tensor) else torch.tensor(column)  # type: ignore[arg-type]
                table[i] = whole.double()
            table[-1] = self.next_flush if self.world.rank == self.source else 0
        table = self._mean(table) if self.averaged else self._to_main(table)
        if self.averaged or self.world.is_main:
            self.next_flush = int(table[-1, 0])
        if not self.world.is_main:
            return
        columns = table.tolist()
        self._look_for_divergence([row[0] for row in rows], dict(zip(names, columns, strict=False)))
        self.metrics.add(
            {"global_step": s, "samples": self._samples(s), "time": round(t - self.began, 6)}
            | {name: columns[i][at] for i, name in enumerate(names)}
            for at, (s, t, _) in enumerate(rows)
        )
        shown = "  ".join(f"{name} {columns[i][-1]:.4g}" for i, name in enumerate(names))
        self.screen.progress(step, self.total, f"{shown}  {self.samples_per_second():.0f} samples/s")

    def _look_for_divergence(self, steps: list[int], columns: dict[str, list[float]]) -> None:
        """Note the first step whose loss is no finite number, and which samples it was given.

        A step that was `skipped` has harmed nothing: its gradients were too large for fp16.
        """
        losses = columns.get("loss", [])
        skipped = columns.get("skipped", [0.0] * len(losses))
        at = next((i for i, loss in enumerate(losses) if not math.isfinite(loss) and not skipped[i]), None)
        if at is None or self.diverged or self.training is None:
            return
        epoch = (steps[at] - 1) // self.training.loader.steps
        start = self._samples(epoch * self.training.loader.steps)
        first, after = (self._samples(step) - start for step in (steps[at] - 1, steps[at]))
        self.diverged = (
            f"the loss of step {steps[at]} is {columns['loss'][at]} (epoch {epoch}, positions {first} to "
            f"{after - 1} of its order); lower optim.lr, or set clip where there is one"
        )

    def _samples(self, steps: int) -> int:
        """Samples in so many steps from the start; the last step of an epoch may have fewer."""
        return self.training.loader.samples(steps) if self.training else steps * self.settings.batch

    def _mean(self, table: Tensor) -> Tensor:
        """The means over all ranks, added in their order whatever the number of rows, and `source`'s own last row."""
        table[:-1] /= self.world.size
        table = table.to(self.world.device)
        tables = [torch.empty_like(table) for _ in range(self.world.size)]
        dist.all_gather(tables, table)
        return functools.reduce(torch.add, tables).cpu()

    def _to_main(self, table: Tensor) -> Tensor:
        if self.source == 0:
            return table
        table = table.to(self.world.device)
        if self.world.rank == self.source:
            dist.send(table, 0, tag=METRICS_TAG)
        else:
            dist.recv(table, self.source, tag=METRICS_TAG)
        return table.cpu()

    def record(self, step: int, **values: float) -> None:
        """Values that rank 0 knows, such as an evaluation's; all ranks call it."""
        self.flush()
        if self.world.is_main:
            now = time.perf_counter() - self.began
            self.metrics.add([{"global_step": step, "samples": self._samples(step), "time": round(now, 6)} | values])
        self._save_best(step, values)
        self.safe_point(step, now=True)

    def step_seconds(self) -> float:
        """The mean training step, evaluation and the first steps left out; 0 before there is one."""
        steady = self._steady()
        return sum(steady) / len(steady) if steady else 0.0

    def samples_per_second(self) -> float:
        steady = self._steady()
        return (self._samples(self.last) - self._samples(self.last - len(steady))) / sum(steady) if steady else 0.0

    def _steady(self) -> list[float]:
        """The durations of the newest steps, the first ones left out."""
        return self.durations[min(WARM_UP, len(self.durations) // 3) :]

    def finish(self, **result: Any) -> None:
        """Write the final numbers; rank 0 calls it. A start that was cut off and overtaken by a newer one does not."""
        if self.folder.superseded:
            return
        self.metrics.flush()
        result = {"state": "finished", "exit_status": 0, "peak_memory": self.memory} | finite(result)
        write_json(self.folder.path / "result.json", result)

    def places(self) -> dict[str, str]:
        """Rows of the final table: where everything lies, and how to see and repeat it."""
        path, name = self.folder.path, config.name_of(type(self.settings))
        result, values = (shlex.quote(str(path / file)) for file in ("result.json", "config.yaml"))
        return {
            "run folder": str(path),
            "metrics": str(self.folder.metrics_file),
            "show": f"cat {result}",
            "repeat": f"python experiments/{name}.py --config {values}",
        }

    def close(self) -> None:
        self.notice.close()
        self.checkpoints.close()
        for handler in self.logger.handlers[:]:
            self.logger.removeHandler(handler)
            with contextlib.suppress(OSError):  # a full disk does not take the last words
                handler.close()
        if self.profiler is not None:
            self.profiler.stop()
        self.screen.close()
