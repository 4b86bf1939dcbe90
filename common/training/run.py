"""The one object that an experiment talks to: folder, logger, metrics, progress, profile, result."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from common.checkpoint.checkpointer import Checkpointer, read_full_model
from common.checkpoint.preemption import SilenceWatch, StopAgreement, StopRequest, StopRequested
from common.checkpoint.storage import CheckpointPath, InvalidCheckpoint
from common.checkpoint.train_state import TrainState
from common.core import config
from common.core.errors import UserError, first_line
from common.data import loader as data
from common.data.loader import AccumulationLoader
from common.data.prepare import Prepared
from common.distributed.rendezvous import World
from common.measure import media, profiler
from common.models import model_file
from common.models.networks import Recipe
from common.runs.folder import Folder, read_json, write_json
from common.runs.metrics_writer import MetricsWriter, replace_nonfinite
from common.training.progress import Screen
from configs.shared import Experiment

WARM_UP = 10  # steps left out of the throughput, of a short run a third
HEARTBEAT = 5.0  # seconds
SCORES = ("test_loss", "test_accuracy", "test_samples")
METRICS_TAG = 1 << 20  # above every tag of the pipeline


def stack(values: list[Any]) -> Tensor:
    """Values of several steps as one tensor in float64: those of a GPU are fetched at once."""
    tensors = all(isinstance(value, Tensor) for value in values)
    return torch.stack(values).double() if tensors else torch.tensor(values, dtype=torch.float64)


class Run:
    """What one process of a run uses for everything that is not the method.

    `source` is the rank that knows the values given to `log` (a pipeline's last stage knows the loss);
    rank 0 writes them. With `averaged` all ranks give values and their means are written (each rank has the
    loss of its share of the batch). The experiment sets these, and `total`, before the first step.
    """

    def __init__(
        self, settings: Experiment, folder: Folder, world: World, prepared: Prepared, notice: StopRequest | None = None
    ) -> None:
        self.settings, self.folder, self.world, self.prepared = settings, folder, world, prepared
        self.source, self.averaged, self.total = 0, False, 0
        self.screen = Screen(settings.log, silent=not world.is_main)
        self.logger = self._logger()
        self.rows: list[tuple[int, float, dict[str, Tensor | float | None]]] = []
        self.names: list[str] = []  # of all values so far, in one order on all ranks whose values count
        self.next_flush = 1
        self.durations: list[float] = []
        self.last = 0  # the newest step
        self.mark: float | None = None
        self.began = self.flushed = time.perf_counter()
        self.beat = 0.0
        self.profiler = profiler.begin(settings.profile, folder.attempt / f"trace-{world.rank}.json", self.say)
        self.notice = notice or StopRequest(settings.checkpoint.grace, sys.stderr)
        self.points = StopAgreement(world, settings.checkpoint, self.notice)
        self.silence = self._watch_for_silence() if world.backend == "nccl" and world.size > 1 else None
        self.checkpoints = Checkpointer(folder, world, settings.checkpoint, self.say)
        self.training: TrainState | None = None
        self.diverged = ""
        self.finished = False
        self.memory: dict[str, int] = {}  # of each process, the most bytes it has held
        self.before_backward: Callable[[], float | None] = lambda: None  # seconds of a step, where they are measured
        self.best: float | None = None  # what `checkpoint.best` names, in the best evaluation so far
        self.unevaluated = False  # the state that was loaded was saved before the evaluation after its step
        self.recipe: Recipe | None = None  # how to build the model again
        self.metrics = MetricsWriter(folder.metrics_file, lambda text: self.say(text, logging.WARNING))
        if world.is_main:
            write_json(folder.attempt / "world.json", self._world())

    def _world(self) -> dict[str, Any]:
        """Where this attempt runs, for meta.json."""
        world, cuda = self.world, self.world.device.type == "cuda"
        return {
            "processes": world.size,
            "nodes": world.nodes,
            "hosts": list(world.hosts),
            "launched_by": world.launcher,
            "backend": world.backend,
            "device": torch.cuda.get_device_name(world.device) if cuda else "cpu",
            "cuda": torch.version.cuda if cuda else None,
            "threads": world.threads,
            "rendezvous_seconds": round(world.rendezvous_seconds, 3),
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

    def resume(self, training: TrainState) -> int:
        """Load the newest checkpoint of the run, if there is one; returns the steps done. All ranks call it."""
        if self.total < 1:
            raise RuntimeError("run.total is not set: set it to the run's number of steps before run.resume(...)")
        self.training, self.recipe = training, self.recipe or training.recipe
        loaded = self.checkpoints.load()
        step, parent, rows = 0, None, 0
        if loaded is not None:
            training.load(loaded)
            step, parent, rows = loaded.step, loaded.attempt, int(loaded.common["rows"])
            self.began -= loaded.common["seconds"]
            self.best = loaded.common["best"]
            self.unevaluated = loaded.common.get("unevaluated", False)
            self.say(f"goes on after step {step}, saved by attempt {parent}")
        if self.world.is_main:
            self.folder.set_parent(parent, step, rows)
        self.points.begin(step)
        self.last = step
        self._watch()
        return step

    def checkpoint_or_stop(self, step: int, *, now: bool = False) -> None:
        """Between two steps: save if it is time; if any rank was told to stop, save and leave. All ranks call it.

        Raises StopRequested after saving, and UserError when the loss is no number any more or nothing could be saved.
        """
        if not now and not self.points.reached(step):
            return
        self.flush()
        wanted = self.points.agree(step, bool(self.diverged))
        self._watch()
        if wanted.diverged:
            self._end_if_diverged()
        saved = wanted.save and self._save(step)
        self.mark = time.perf_counter()  # the time since the last step was no training
        if wanted.leave:
            self._leave(step, saved)

    def _end_if_diverged(self) -> None:
        """All ranks call it, and raise the same words, whoever is heard first."""
        why = self.world.broadcast(self.diverged)
        if why:
            raise UserError(why)

    def _leave(self, step: int, saved: bool) -> NoReturn:
        """Leave, to be continued after `step`. Raises StopRequested, or UserError if that was not saved."""
        if not saved:
            raise UserError(f"told to stop after step {step}, and it could not be saved, as told above")
        self.say(f"told to stop: saved after step {step}, to be continued")
        raise StopRequested

    def _save(self, step: int, *, best: bool = False) -> bool:
        if self.training is None:
            raise RuntimeError("run.resume(...) was not called: call it before the first step")
        if self.world.broadcast(bool(self.metrics.waiting)):  # the next start would miss these rows
            self.say(f"WARNING: no checkpoint of step {step}: the disk does not even take its metrics", logging.WARNING)
            return False
        state = self.training.state()
        finite = all(bool(value.isfinite().all()) for value in state.model.values())
        if not self.world.broadcast(all(self.world.gather(finite))):
            raise UserError(f"a parameter is no finite number after step {step}; lower optim.lr")
        wandb = read_json(self.folder.path / "wandb" / "id.json").get("id")
        state.common |= {"rows": self.metrics.written, "seconds": time.perf_counter() - self.began, "wandb": wandb}
        state.common |= {"best": self.best, "unevaluated": self.unevaluated}
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
        if self.silence is not None:
            self.silence.restart()

    def _watch_for_silence(self) -> SilenceWatch:
        """Name the ranks that do not answer before NCCL's time-out ends this process."""
        allowed = self.settings.launch.step_timeout
        return SilenceWatch(self.world, 0.7 * allowed, 0.1 * allowed, self.note)

    # ---- numbers

    def log(self, step: int, **values: Tensor | float | None) -> None:
        """Values of one training step, tensors unsynchronised; all ranks call it after every step, counted from 1.

        The values come from the rank `source` (elsewhere they may be None) and reach the disk, then W&B, in batches
        about `log.seconds` apart. A step may leave out names. Raises RuntimeError unless steps come one by one.
        """
        if step != self.last + 1:
            raise RuntimeError(f"run.log(step={step}) follows step {self.last}: call it once after every step")
        self._wait(step)
        now = time.perf_counter()
        if self.mark is not None:
            self.durations.append(now - self.mark)
        self.mark, self.last = now, step
        self.notice.all_saved = False
        self.rows.append((step, now, values))
        if step >= self.next_flush:
            self.flush()
        self._show_life(now)
        if self.profiler is not None:
            self.profiler.step()

    def _show_life(self, now: float) -> None:
        """Write this rank's heartbeat, at most every HEARTBEAT seconds."""
        if now - self.beat > HEARTBEAT:
            self.beat = now
            with contextlib.suppress(UserError):  # a full disk is told of by what matters more
                self.folder.heartbeat(self.world.rank, self.last, time.time(), self.before_backward())

    def log_image(self, step: int, name: str, pixels: Tensor) -> None:
        """An image [H, W] or [3, H, W], uint8 or floats from 0 to 1, in the run folder and in W&B. Rank 0's counts; any
        step may have one, and the other ranks need not call it. Raises ValueError for another shape or a bad name.
        """
        if self.world.is_main:
            media.write_image(self.folder, step, name, pixels)

    def log_histogram(self, step: int, name: str, values: Tensor) -> None:
        """How often values of a tensor of any shape fall into 64 bins; otherwise as `log_image`."""
        if self.world.is_main:
            media.write_histogram(self.folder, step, name, values)

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
        step, now = rows[-1][0], rows[-1][1]
        # when to flush next is decided by `source` and travels with the values, so that both ends agree
        count = int(len(rows) * self.settings.log.seconds / max(now - self.flushed, 1e-6))
        self.flushed = now
        self.next_flush = step + min(max(1, count), 4 * len(rows))
        if self.world.rank not in (0, self.source) and not self.averaged:
            self.next_flush = sys.maxsize
            return
        given = (
            [values for _, _, values in rows] if self.world.rank == self.source or self.averaged else [{}] * len(rows)
        )
        values, there = self._bring_to_main(given)
        if not self.world.is_main:
            return
        columns = dict(zip(self.names, values.tolist(), strict=True))
        known = dict(zip(self.names, there.tolist(), strict=True))
        self._look_for_divergence([row[0] for row in rows], columns, known)
        self.metrics.add(
            {"global_step": s, "samples": self._samples(s), "time": round(t - self.began, 6)}
            | {name: column[at] for name, column in columns.items() if known[name][at]}
            for at, (s, t, _) in enumerate(rows)
        )
        newest = {name: column[-1] for name, column in columns.items() if known[name][-1]}
        shown = "  ".join(f"{name} {value:.4g}" for name, value in newest.items())
        self.screen.progress(step, self.total, f"{shown}  {self.samples_per_second():.0f} samples/s")

    def _bring_to_main(self, given: list[dict[str, Tensor | float | None]]) -> tuple[Tensor, Tensor]:
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
            table = self._mean(table) if self.averaged else self._to_main(table)
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
            return self.world.broadcast(list(dict.fromkeys(name for names in gathered for name in names)))
        text = torch.tensor(list(json.dumps(new).encode()), dtype=torch.uint8)
        size = self._to_main(torch.tensor([float(len(text))]))
        if self.world.rank != self.source:
            text = torch.zeros(int(size), dtype=torch.uint8)
        return list(json.loads(bytes(self._to_main(text).tolist())))

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
        return self.training.loader.count_samples(steps) if self.training else steps * self.settings.batch

    def _mean(self, table: Tensor) -> Tensor:
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

    def _to_main(self, table: Tensor) -> Tensor:
        if self.source == 0:
            return table
        table = table.to(self.world.device)
        if self.world.rank == self.source:
            dist.send(table, 0, tag=METRICS_TAG)
        else:
            dist.recv(table, self.source, tag=METRICS_TAG)
        return table.cpu()

    def evaluate(self, step: int, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Measure the model after `step` steps and record the numbers. All ranks call it.

        `measure` calls `look` between two batches: a notice to stop saves the state before the evaluation, which is
        done again after a resume. That after the last step is saved in any case.
        """
        self.flush()
        self._end_if_diverged()
        self.unevaluated = True
        if self.training is not None:
            self.training.hold_buffers()
        values = measure()
        last = step >= self.total
        saved = last and self._save(step)
        if last and not saved:
            self._end_unsaved(step)
        if self.training is not None:
            self.training.release_buffers()
        self.unevaluated = False
        self.record(step, **values)
        self.notice.all_saved = saved
        return values

    def _end_unsaved(self, step: int) -> NoReturn:
        """Raise UserError: the trained model cannot be kept. All ranks call it, and raise the same words."""
        why = f"the model after step {step}, the last one, cannot be kept, as told above; free space"
        if self.world.is_main:
            try:
                self.metrics.flush()
            except UserError as error:
                why = str(error)
        raise UserError(self.world.broadcast(why))

    def look(self) -> None:
        """Between two batches of an evaluation: if any rank was told to stop, save and leave. All ranks call it.

        Raises StopRequested after saving, and UserError if nothing could be saved.
        """
        self._watch()
        self._show_life(time.perf_counter())
        if self.points.asked():
            self._leave(self.last, self._save(self.last))

    def record(self, step: int, **values: float) -> None:
        """Values that rank 0 knows, such as an evaluation's; all ranks call it."""
        self.flush()
        if self.world.is_main:
            now = time.perf_counter() - self.began
            self.metrics.add([{"global_step": step, "samples": self._samples(step), "time": round(now, 6)} | values])
        self._save_best(step, values)
        self.checkpoint_or_stop(step, now=True)

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
        if self.total < 1:
            raise RuntimeError("run.total is not set: set it to the run's number of steps, and call run.resume(...)")
        if self.last < self.total:
            raise RuntimeError(f"run.finish() after step {self.last} of {self.total}: train to the end before it")
        self.finished, self.notice.all_saved = True, False
        if self.folder.superseded:
            return
        self.metrics.flush()
        result = {"state": "finished", "exit_status": 0, "peak_memory": self.memory} | replace_nonfinite(result)
        self._keep_model(result)
        write_json(self.folder.path / "result.json", result)

    def _keep_model(self, result: dict[str, Any]) -> None:
        """Write the model of the last step beside the result, with what is needed to build and evaluate it."""
        training, settings = self.training, self.settings
        if training is None or self.checkpoints.saved != self.last:
            self.say("WARNING: no model is kept: call run.resume(...) and run.evaluate(...)", logging.WARNING)
            return
        peers = training.peers
        loader = training.loader.loader if isinstance(training.loader, AccumulationLoader) else training.loader
        mean, std = data.STATISTICS[self.prepared.name]
        facts = {
            "run": self.folder.path.name,
            "experiment": self.folder.experiment,
            "step": self.last,
            "device": self.world.device.type,
            "epoch_steps": training.loader.steps,
            "data": self.prepared.name,
            "classes": self.prepared.classes or loader.data.classes,
            "shape": list(loader.data.shape),
            "mean": mean,
            "std": std,
            "dtype": settings.dtype,
            "precision": getattr(settings, "precision", "fp32"),
            "channels_last": getattr(settings, "channels_last", False),
            "eval_batch": settings.eval_batch,
            "shares": peers.size if peers else 1,
            "scores": {name: result[name] for name in SCORES if name in result},
        }
        try:
            state = read_full_model(CheckpointPath(self.folder, self.last))
            model_file.write(self.folder, state, self.recipe, facts)
        except (OSError, InvalidCheckpoint) as error:
            raise UserError(
                f"the model after step {self.last} cannot be kept: {first_line(error)}; free space"
            ) from None

    def places(self) -> dict[str, str]:
        """Rows of the final table: where everything lies, and how to see and repeat it."""
        path, name = self.folder.path, config.experiment_name(type(self.settings))
        result, values = (shlex.quote(str(path / file)) for file in ("result.json", "config.yaml"))
        try:
            changed = config.read_all_changes(path)
            repeat = f"not by one command: it was resumed with {config.describe_changes(changed)}" if changed else ""
        except UserError as error:
            repeat = f"not by one command: {error}"
        return {
            "run folder": str(path),
            "metrics": str(self.folder.metrics_file),
            "show": f"cat {result}",
            "repeat": repeat or f"python experiments/{name}.py --config {values}",
        }

    def close(self) -> None:
        if self.last == self.total > 0:  # the last sign of life is of the last step
            self._show_life(math.inf)
        self.notice.close()
        if self.silence is not None:
            self.silence.close()
        self.checkpoints.close()
        for handler in self.logger.handlers[:]:
            self.logger.removeHandler(handler)
            with contextlib.suppress(OSError):  # a full disk does not take the last words
                handler.close()
        if self.profiler is not None:
            self.profiler.stop()
        self.screen.close()
