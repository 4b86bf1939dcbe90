"""Checkpointer of a run as training goes on: saved when it is time, at the best evaluation, and on a stop request."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from common.checkpoint.checkpointer import Checkpointer, LoadedCheckpoint
from common.checkpoint.save_or_stop import SaveOrStopVote
from common.checkpoint.stop_request import StopRequest, StopRequested
from common.checkpoint.train_state import TrainState
from common.core.errors import RunTaken, UserError
from common.distributed.rendezvous import World
from common.distributed.silent_ranks import SilenceWatch
from common.measure.metrics_log import MetricsLog
from common.runs.claims import AttemptWatch
from common.runs.folder import Folder, read_json
from configs.shared import Experiment


class Saver:
    """Saver of the state of a run, which also ends it after a checkpoint when any rank has a stop request.

    Every method is called by all ranks, after the same step.
    """

    def __init__(
        self, cfg: Experiment, folder: Folder, world: World, stop: StopRequest | None, log_message: Callable[..., None]
    ) -> None:
        self.cfg, self.folder, self.world, self.log_message = cfg, folder, world, log_message
        self.stop = stop or StopRequest(cfg.checkpoint.grace, sys.stderr)
        self.vote = SaveOrStopVote(world, cfg.checkpoint, self.stop)
        self.watch = AttemptWatch(folder)
        self.step = 0
        """The newest step that was voted on, or saved."""
        self.loss = ""
        """On rank 0, why this attempt must stop: another one has the run, or the folder is gone."""
        self.checkpointer = Checkpointer(folder, world, cfg.checkpoint, log_message, self._find_loss)
        self.silence: SilenceWatch | None = None
        self.state: TrainState | None = None
        self.metrics: MetricsLog | None = None
        self.began = time.perf_counter()
        """Start of the run by time.perf_counter(), earlier by the seconds that former attempts took."""
        self.best: float | None = None
        """The score that `checkpoint.best` names, in the best evaluation so far."""
        self.unevaluated = False
        """True until the evaluation after the newest step is done."""

    def load(self, state: TrainState) -> LoadedCheckpoint | None:
        """Load the newest checkpoint of the run into `state`, if there is one."""
        self.state = state
        loaded = None if self.world.joins else self.checkpointer.load(state.check_ranks)
        if loaded is not None:
            state.load(loaded)
            self.began -= loaded.common["seconds"]
            self.best = loaded.common["best"]
            self.unevaluated = loaded.common.get("unevaluated", False)
        self.vote.begin_after(loaded.step if loaded else 0)
        self.restart_watchdogs()
        return loaded

    def start_silence_watch(self, tell: Callable[[str], None]) -> None:
        """Name the ranks that do not answer before NCCL's time-out ends this process."""
        allowed = self.cfg.launch.step_timeout
        self.silence = SilenceWatch(self.world, 0.7 * allowed, 0.1 * allowed, tell)

    def restart_watchdogs(self) -> None:
        """Restart the time after which a step's stacks are written to the log and silent ranks are named."""
        self.stop.dump_stacks_after(0.9 * self.cfg.launch.step_timeout)
        if self.silence is not None:
            self.silence.restart()

    def checkpoint_or_stop(self, step: int, *, now: bool = False) -> bool:
        """Save if it is time; if any rank has a stop request, save and stop. Return True if it was time to save.

        Raises StopRequested after saving, and UserError when the loss is no finite number any more or the checkpoint
        of a stop request could not be written.
        """
        if not now and not self.vote.is_due(step):
            return False
        assert self.metrics is not None
        came = time.perf_counter()
        self.metrics.flush()  # ranks may wait for each other here already
        self.step = step
        loss = self._find_loss() if self.world.is_main else ""
        decision = self.vote.decide(step, bool(self.metrics.diverged), came, lost=bool(loss))
        self.metrics.drop_kept_rows()
        self.restart_watchdogs()
        if decision.lost:
            self._stop_lost()
        if decision.diverged:
            self.raise_if_diverged()
        saved = decision.save and self.save(step)
        if decision.stop:
            self._stop(step, saved)
        return decision.save

    def stop_in_evaluation(self, step: int) -> None:
        """Between two batches of an evaluation: if any rank has a stop request, save the state before it and stop.

        Raises StopRequested after saving, and UserError if the checkpoint could not be written.
        """
        self.restart_watchdogs()
        self.step = step
        decision = self.vote.vote_in_evaluation(self._find_loss)
        if decision.lost:
            self._stop_lost()
        if decision.stop:
            self._stop(step, self.save(step))

    def raise_if_diverged(self) -> None:
        """Raise UserError with the same words on all ranks where the loss is no finite number any more."""
        assert self.metrics is not None
        why = self.world.broadcast(self.metrics.diverged)
        if why:
            raise UserError(why)

    def _find_loss(self) -> str:
        """Find, on rank 0, why this attempt must stop without saving; empty where it may go on."""
        self.loss = self.watch.find_problem(self.step)
        return self.loss

    def _stop_lost(self) -> NoReturn:
        """Raise RunTaken with the same words on all ranks."""
        raise RunTaken(self.world.broadcast(self.loss))

    def _stop(self, step: int, saved: bool) -> NoReturn:
        if not saved:
            raise UserError(f"stop request after step {step}, which could not be saved: {self._describe_refusal()}")
        self.log_message(f"stop request: saved after step {step}, to be continued")
        raise StopRequested

    def raise_if_lost(self, step: int) -> None:
        """Raise RunTaken where this attempt must stop; rank 0 alone calls it."""
        self.step = step
        if self._find_loss():
            raise RunTaken(self.loss)

    def save(self, step: int, *, best: bool = False) -> bool:
        """Write a checkpoint; return False if the disk refuses. Raises UserError if a parameter is NaN or infinite."""
        assert self.state is not None and self.metrics is not None
        self.step = step
        writer = self.metrics.writer
        if self.world.broadcast(bool(writer.waiting)):  # the next attempt would miss these rows
            if self.world.broadcast(bool(self._find_loss()) if self.world.is_main else False):
                self._stop_lost()
            problem = f"cannot write {self.folder.metrics_file}; free disk space"
            self.checkpointer.report_refusal(step, problem, is_known=True)
            return False
        state = self.state.collect_state()
        finite = all(bool(value.isfinite().all()) for value in state.model.values())
        if not self.world.broadcast(all(self.world.gather(finite))):
            raise UserError(f"a parameter is no finite number after step {step}; lower optim.lr")
        wandb = read_json(self.folder.path / "wandb" / "id.json").get("id")
        state.common |= {"rows": writer.written, "seconds": time.perf_counter() - self.began, "wandb": wandb}
        state.common |= {"best": self.best, "unevaluated": self.unevaluated}
        return self.checkpointer.save(step, state, best=best)

    def save_best(self, step: int, scores: dict[str, float]) -> None:
        """Keep the state of an evaluation that is the best so far."""
        name = self.cfg.checkpoint.best
        value = self.world.broadcast(scores.get(name)) if name != "none" else None
        if value is None:
            return
        if self.best is None or (value > self.best if name == "test_accuracy" else value < self.best):
            before, self.best = self.best, value
            try:
                self.save(step, best=True)
            except RuntimeError:  # it is not saved, and an elastic run evaluates again
                self.best = before
                raise

    def save_last(self, step: int) -> None:
        """Save the trained model. Raises UserError, with the same words on all ranks, where that fails."""
        if self.save(step):
            return
        why = f"the model after step {step}, the last one, could not be saved: {self._describe_refusal()}"
        if self.world.is_main:
            assert self.metrics is not None
            try:
                self.metrics.writer.flush()
            except UserError as error:
                why = str(error)
        raise UserError(self.world.broadcast(why))

    def _describe_refusal(self) -> str:
        """Return why the newest checkpoint could not be written, with the remedy."""
        problem = self.checkpointer.problem
        remedy = "raise ulimit -f" if os.strerror(errno.EFBIG) in problem else "free space"
        return f"{problem}; {remedy}"

    def close(self) -> None:
        """End the watchdogs, and wait until old checkpoints are deleted."""
        self.stop.cancel_watchdog()
        if self.silence is not None:
            self.silence.close()
        self.checkpointer.wait_for_deletions()
        self.watch.close()
