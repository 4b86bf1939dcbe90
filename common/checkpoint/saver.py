"""Saving of checkpoints: at regular intervals, after each best evaluation, and before the run stops."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NoReturn

from common.checkpoint.checkpointer import Checkpointer
from common.checkpoint.loading import LoadedCheckpoint
from common.checkpoint.rank_file import WriteProblem
from common.checkpoint.save_or_stop_vote import SaveOrStopVote
from common.checkpoint.stop_request import StopRequest, StopRequested
from common.checkpoint.train_state import TrainState
from common.measure.metrics_log import MetricsLog
from common.ranks.ranks import Ranks
from common.ranks.silent_ranks import SilentRankWatchdog
from common.runs.claims import AttemptWatch
from common.runs.folder import RunFolder, read_json
from common.runs.run_progress import RunProgress
from common.system.causes import Cause
from common.system.errors import RunTakenError, UserError, summarize_error
from configs.shared import Experiment

SAVE_REMEDIES = {
    Cause.DISK_FULL: "free space",
    Cause.DISK_READ_ONLY: "make the disk writable",
    Cause.FILE_TOO_LARGE: "raise ulimit -f",
}
"""What makes it possible to save a checkpoint again."""


class Saver:
    """Saves and loads checkpoints, and stops the run when a rank receives a stop request.

    Unless documented otherwise, all ranks must call each method after the same step.
    """

    def __init__(
        self,
        cfg: Experiment,
        folder: RunFolder,
        ranks: Ranks,
        stop_request: StopRequest,
        log_message: Callable[..., None],
        progress: RunProgress,
    ) -> None:
        self.cfg = cfg
        self.folder = folder
        self.ranks = ranks
        self.log_message = log_message
        self.progress = progress
        self.stop_request = stop_request
        self.vote = SaveOrStopVote(ranks, cfg.checkpoint, self.stop_request)
        self.attempt_watch = AttemptWatch(folder)
        self.step = 0
        """The latest step after which the ranks have voted or saved a checkpoint."""
        self.stop_reason = ""
        """On rank 0, the reason why this attempt must stop without saving, or an empty string. An attempt must stop if
        another attempt has taken over the run or if its folder was deleted."""
        self.checkpointer = Checkpointer(folder, ranks, cfg.checkpoint, log_message, self._find_stop_reason, progress)
        self.silence_watch: SilentRankWatchdog | None = None
        self.state: TrainState | None = None
        self.metrics: MetricsLog | None = None

    def load(self, state: TrainState, metrics: MetricsLog) -> LoadedCheckpoint | None:
        """Load the newest valid checkpoint of the run into `state`; return None if the run has no checkpoint.

        From now on, this object saves `state` and flushes `metrics`.
        """
        self.state = state
        self.metrics = metrics
        loaded = None if self.ranks.current.is_joining else self.checkpointer.load(state.check_number_of_ranks)
        if loaded is not None:
            state.load(loaded)
            self.progress.resume_after(loaded.step, loaded.common, self.cfg.checkpoint.best)
        self.vote.start_votes_after(loaded.step if loaded else 0)
        self.restart_watchdogs()
        return loaded

    def start_silence_watch(self, log_failure: Callable[[str], None]) -> None:
        """Start to report ranks that do not respond, before NCCL's timeout kills this process."""
        timeout = self.cfg.launch.step_timeout
        self.silence_watch = SilentRankWatchdog(self.ranks, 0.7 * timeout, 0.1 * timeout, log_failure)

    def restart_watchdogs(self) -> None:
        """Restart the timers that detect a step that hangs.

        When the timers expire, the stack traces of all threads are written to the log, and ranks that do not respond
        are reported.
        """
        self.stop_request.dump_stacks_after(0.9 * self.cfg.launch.step_timeout)
        if self.silence_watch is not None:
            self.silence_watch.restart_time_limit()

    def checkpoint_or_stop(self, step: int, *, now: bool = False) -> bool:
        """Save a checkpoint if one is due; if any rank has received a stop request, save and stop.

        Returns True if a checkpoint was due. If `now` is True, the ranks vote even if no vote is due. After a stop
        request, raises StopRequested if the checkpoint has been saved, or UserError if the checkpoint cannot be
        written. Also raises UserError if the loss is NaN or infinite.
        """
        if not now and not self.vote.is_vote_due(step):
            return False
        assert self.metrics is not None
        wait_start = time.perf_counter()
        self.metrics.flush()  # measured as waiting time, because flushing may wait for other ranks
        self.step = step
        run_taken = self.ranks.current.is_main and bool(self._find_stop_reason())
        decision = self.vote.vote_after_step(step, bool(self.metrics.divergence), wait_start, run_taken=run_taken)
        self.metrics.drop_unwritten_rows()
        self.restart_watchdogs()
        if decision.run_taken:
            self._raise_run_taken()
        if decision.diverged:
            self.raise_if_diverged()
        saved = decision.save and self.save(step)
        self.vote.finish_save()
        if decision.stop:
            self._raise_stop_requested(step, saved)
        return decision.save

    def stop_evaluation_if_requested(self, step: int) -> None:
        """Save and stop during an evaluation if any rank has received a stop request.

        Call this method between two batches of an evaluation. The checkpoint contains the state before the evaluation.
        Raises StopRequested after saving, or UserError if the checkpoint cannot be written.
        """
        self.restart_watchdogs()
        self.step = step
        decision = self.vote.vote_in_evaluation(self._find_stop_reason)
        if decision.run_taken:
            self._raise_run_taken()
        if decision.stop:
            self._raise_stop_requested(step, self.save(step))

    def raise_if_diverged(self) -> None:
        """Raise UserError on all ranks, with the same message, if the loss is NaN or infinite."""
        assert self.metrics is not None
        problem = self.ranks.current.broadcast(self.metrics.divergence)
        if problem:
            raise UserError(problem, cause=Cause.DIVERGED)

    def _find_stop_reason(self) -> str:
        """Return the reason why this attempt must stop without saving, or an empty string.

        Call this method on rank 0 only.
        """
        self.stop_reason = self.attempt_watch.find_stop_reason(self.step)
        return self.stop_reason

    def _raise_run_taken(self) -> NoReturn:
        """Raise RunTakenError on all ranks, with the same message."""
        raise RunTakenError(self.ranks.current.broadcast(self.stop_reason))

    def _raise_stop_requested(self, step: int, saved: bool) -> NoReturn:
        """Raise StopRequested if the checkpoint has been saved, or UserError otherwise."""
        if not saved:
            problem = self._describe_failed_save()
            raise UserError(
                f"stopped on request, but the checkpoint of step {step} could not be saved: {problem.text}",
                cause=problem.cause,
            )
        self.log_message(f"stopped on request; checkpoint saved at step {step}")
        raise StopRequested

    def raise_if_run_taken(self, step: int) -> None:
        """Raise RunTakenError if this attempt must stop. Call this method on rank 0 only."""
        self.step = step
        if self._find_stop_reason():
            raise RunTakenError(self.stop_reason)

    def save(self, step: int, *, best: bool = False) -> bool:
        """Write a checkpoint; return False if writing fails.

        Raises UserError if a parameter is NaN or infinite.
        """
        assert self.state is not None and self.metrics is not None
        world = self.ranks.current
        self.step = step
        writer = self.metrics.writer
        # Rows of metrics that cannot be written to the disk would be missing after a resume from this checkpoint.
        if world.broadcast(bool(writer.buffered_lines)):
            problem = self.checkpointer.run_on_main(writer.write_buffered_rows)
            if problem is not None:
                file = str(self.folder.metrics_file)
                text = problem.text if file in problem.text else f"cannot write {file}: {problem.text}"
                self.checkpointer.report_failed_save(step, problem._replace(text=text), is_known=True)
                return False

        state = self.state.collect_state()
        checked = state.model.keys() - self.state.infinite_buffers
        is_finite = all(bool(state.model[name].isfinite().all()) for name in checked)
        if not world.broadcast(all(world.gather(is_finite))):
            text = f"parameters contain NaN or infinity after step {step}; lower optim.lr"
            raise UserError(text, cause=Cause.DIVERGED)

        state.common["rows"] = writer.written
        state.common |= self.progress.to_checkpoint()
        state.common["best_of"] = self.cfg.checkpoint.best
        state.common["wandb"] = read_json(self.folder.path / "wandb" / "id.json").get("id")
        return self.checkpointer.save(step, state, best=best)

    def broadcast_score(self, scores: dict[str, float]) -> float | None:
        """Return the score that `checkpoint.best` names, or None if rank 0 does not know this score."""
        name = self.cfg.checkpoint.best
        return self.ranks.current.broadcast(scores.get(name)) if name != "none" else None

    def save_if_best(self, step: int, score: float | None) -> None:
        """Save the state after an evaluation if `score` is the best so far."""
        if score is None:
            return
        previous = self.progress.best_score
        if previous is not None:
            is_better = score > previous if self.cfg.checkpoint.best == "test_accuracy" else score < previous
            if not is_better:
                return
        # If ranks are lost, an elastic run repeats the evaluation and compares its score again.
        self.progress.improve_best_score(score, lambda: self.save(step, best=True))

    def save_final_model(self, step: int) -> None:
        """Save the trained model after the last step.

        If the checkpoint cannot be written, raise UserError on all ranks, with the same message.
        """
        if self.save(step):
            return
        problem = self._describe_failed_save()
        text = f"the final model (step {step}) could not be saved: {problem.text}"
        cause = problem.cause
        if self.ranks.current.is_main:
            assert self.metrics is not None
            try:  # if the metrics cannot be written either, report that error instead
                self.metrics.writer.write_buffered_rows()
            except UserError as error:
                text = str(error)
                cause = error.cause
            except OSError as error:
                text = f"cannot write {self.folder.metrics_file}: {summarize_error(error)}; check the disk"
        text, cause = self.ranks.current.broadcast([text, cause])
        raise UserError(text, cause=Cause(cause))

    def _describe_failed_save(self) -> WriteProblem:
        """Return the reason why the newest checkpoint could not be written, with a remedy."""
        problem = self.checkpointer.problem
        assert problem is not None
        remedy = SAVE_REMEDIES.get(problem.cause, "check the disk and its permissions")
        return problem._replace(text=f"{problem.text}; {remedy}")

    def close(self) -> None:
        """Stop the watchdogs, and wait until old checkpoints have been deleted."""
        self.stop_request.cancel_watchdog()
        if self.silence_watch is not None:
            self.silence_watch.close()
        self.checkpointer.wait_for_deletions()
        self.attempt_watch.close()
