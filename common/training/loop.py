"""Training loop: iterator over optimizer steps, and work between steps, such as evaluation."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from common.checkpoint.train_state import TrainState
from common.config.lookup import import_object
from common.measure.memory import read_peak_memory
from common.measure.metrics_log import MEAN
from common.measure.step_timing import StepTimer
from common.training import learning_rate
from common.training.run_context import Evaluate, RunContext
from configs.dataparallel import RECOVERY, get_enabled_elastic_settings
from configs.shared import TrainingExperiment


class Step:
    """One optimizer step: forward, backward, and update.

    A step counts as completed when the body of the loop ends, even if the gradient scaler skips the update (fp16). A
    step is also a context manager, which an elastic run requires: the step then counts as completed if the `with` block
    ends without an error. The block must contain everything that has to be repeated if the step fails. Update running
    sums, such as the total loss, after the block, because the block of a failed step may be repeated.
    """

    def __init__(self, run: RunContext, batch: Any, number: int, epoch: int, rate: float) -> None:
        self.run = run
        self.batch = batch
        self.recovery = run.recovery
        self.number = number
        """Number of this step, counted from 1."""
        self.epoch = epoch
        """Epoch of this step, counted from 0."""
        self.rate = rate
        """Learning rate of this step, already set in the optimizer; 0 in a measurement."""
        self.values: dict[str, Tensor | float | None] = {}
        self.committed = False
        self.entered = False
        self.done = False
        self.failure: BaseException | None = None
        """In an elastic run, the error that caused this step to be discarded; None if there was no error."""

    @property
    def x(self) -> Any:
        """Inputs [N, ...] of this rank's N samples, or None on ranks without inputs."""
        return self.batch[0]

    @property
    def y(self) -> Any:
        """Targets [N, ...] of this rank's N samples, or None on ranks without targets."""
        return self.batch[1]

    @property
    def ends_epoch(self) -> bool:
        """True if this step is the last one of its epoch."""
        assert self.run.state is not None
        return self.number % self.run.state.loader.steps == 0

    @property
    def mean_shard(self) -> float:
        """Mean number of samples per rank in the batch, or in each of its microbatches.

        Divide the sum of a rank's losses by `mean_shard`. The mean of the quotients over all ranks is the mean loss of
        the batch, even if the shards have different sizes.
        """
        assert self.run.state is not None
        return self.run.state.loader.mean_shard

    def mark_backward(self) -> None:
        """Record the current time as the start of backward. Only the first call in a step counts.

        Call this method only if the loss is not passed to `log` before backward.
        """
        if self.run.times is not None and "backward" not in self.run.times.marks:
            self.run.times.record_backward_start()

    def log(self, **values: Tensor | float | None) -> None:
        """Log values of this step to metrics.jsonl.

        Tensors are detached, and are not copied to the CPU immediately. Pass None on ranks that do not know a value. In
        an elastic run, every rank must know all values, which are averaged over the ranks. Log the loss before
        backward: the averaging then overlaps with backward, and the start and end of backward are recorded.
        """
        for name, value in values.items():
            if isinstance(value, Tensor) and value.requires_grad:
                if self.run.times is not None:
                    self.run.times.watch_backward(value)
                values[name] = value.detach()
        self.values |= values
        if self.recovery is not None and not self.committed:
            self.recovery.start_averaging(values)

    def clip_gradients(self, parameters: Iterable[Tensor], max_norm: float) -> None:
        """Scale the gradients so that their norm is at most `max_norm`, and log the norm before the scaling.

        If `max_norm` is 0, the gradients are not clipped. If they are sharded (FSDP2), or if ranks hold other stages of
        the model, all ranks must call this method.
        """
        if max_norm:
            from common.training.gradient_norm import clip_gradients  # imported here because most runs do not clip

            assert self.run.state is not None
            self.log_gradient_norm(clip_gradients(parameters, max_norm, self.run.state))

    def log_gradient_norm(self, norm: Tensor) -> None:
        """Log a norm that a technique has computed to clip the gradients, unless log.gradient_norm=false.

        In an elastic run, the norm must be equal on all ranks.
        """
        if self.run.cfg.log.gradient_norm != "false":
            self.values["gradient_norm"] = norm

    def commit(self) -> None:
        """Confirm that no rank is lost in an elastic run (elastic=true).

        Call this method immediately before the update. This method also averages the values that were logged before
        the call over the ranks. Values that are logged after the call must be equal on all ranks. In a run that is not
        elastic, this method has no effect.
        """
        if self.recovery is not None:
            self.values |= self.recovery.commit()
            self.committed = True

    def complete(self) -> None:
        """Record that the step is completed."""
        self.done = True
        record_step(self.run, self)

    def __enter__(self) -> Step:
        self.entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if kind is None:
            self.complete()
        elif self.recovery is not None and self.recovery.may_come_from_rank_change(error):
            self.failure = error
            self.recovery.discard_step()
        return self.failure is not None


def iterate_steps(run: RunContext, evaluate: Evaluate) -> Iterator[Step]:
    """Yield the remaining optimizer steps of a run; see `Run.steps`."""
    run.start_loop()
    if not run.is_resumed:
        run.resume()
    state = run.state
    assert state is not None
    if run.loss_rank == MEAN and state.parts:
        model = state.parts[0]
        sharded_layers = (layer for layer in model.children() if hasattr(layer, "unshard"))  # added by fully_shard
        run.times = StepTimer(model, run.device, sharded_layers)
    with contextlib.ExitStack() as started_hooks:
        for hook in run.hooks:
            hook.on_start()
            started_hooks.callback(hook.on_end)
        elastic = get_enabled_elastic_settings(run.cfg)
        if elastic is not None:
            run.add_recovery(import_object(RECOVERY)(run, state, elastic))
        recovery = run.recovery
        if recovery is not None:
            started_hooks.callback(recovery.on_end)
        while not run.complete:
            try:
                yield from iterate_until_evaluation(run, state, evaluate)
            except RuntimeError as error:
                if recovery is None or not recovery.may_come_from_rank_change(error):
                    raise
                recovery.join_generation()


def iterate_until_evaluation(run: RunContext, state: TrainState, evaluate: Evaluate) -> Iterator[Step]:
    """Yield the steps up to the next evaluation, and evaluate the model.

    The last evaluation completes the run.
    """
    if run.step < run.total and not run.progress.unevaluated:
        yield from iterate_epoch(run, state)
    scores = evaluate_epoch(run, state, evaluate)
    if scores:
        epochs = run.step / state.loader.steps
        accuracy = f"  test_accuracy {scores['test_accuracy']:.2%}" if "test_accuracy" in scores else ""
        run.log_message(f"epoch {epochs:.3g}  step {run.step}  test_loss {scores['test_loss']:.4f}{accuracy}")
    if run.step < run.total:
        if run.recovery is not None:
            run.recovery.let_ranks_join()
        return

    peaks = run.world.gather(read_peak_memory(run.device))
    if run.recovery is None or run.recovery.finish_run():
        run.memory = {f"rank {rank}": peak for rank, peak in enumerate(peaks)}
        run.scores = scores
        run.complete = True


def iterate_epoch(run: RunContext, state: TrainState) -> Iterator[Step]:
    """Yield the remaining steps of the current epoch, or fewer if the run ends."""
    cfg = run.cfg
    epoch_steps = state.loader.steps
    for part in state.parts:
        part.train()
    for batch in run.times.iterate_batches(state.loader) if run.times else state.loader:
        rate = 0.0
        if isinstance(cfg, TrainingExperiment):
            rate = learning_rate.compute_learning_rate(cfg.optim, run.step, run.total, cfg.batch)
        if state.optimizer is not None:
            learning_rate.set_learning_rate(state.optimizer, rate)
        step = Step(run, batch, run.step + 1, run.step // epoch_steps, rate)
        for hook in run.hooks:
            hook.before_step()

        yield step
        if step.failure is not None:
            raise step.failure
        if step.entered and not step.done:
            raise RuntimeError(f"step {step.number} failed, but the loop over run.steps() was continued")
        if not step.entered:
            if run.recovery is not None:
                raise RuntimeError("elastic=true requires `with step:` around the body of the loop over run.steps()")
            step.complete()

        if run.saver.checkpoint_or_stop(step.number):
            run.pace.exclude_pause()  # the step time does not include a checkpoint
        for hook in run.hooks:
            hook.between_steps(step.number)
        ends_epoch = step.number % epoch_steps == 0
        is_last = step.number == run.total
        if not ends_epoch and (is_last or run.progress.unevaluated):  # after an epoch, the loader must still advance
            return


def is_evaluation_due(run: RunContext, epoch_steps: int, number: int) -> bool:
    """Return True if the model is evaluated after step `number`, which is within an epoch (evaluate_every)."""
    period = run.training_cfg.evaluate_every if run.trains else 0
    is_within_epoch = number < run.total and number % epoch_steps != 0
    return is_within_epoch and period > 0 and number % period == 0


def record_step(run: RunContext, step: Step) -> None:
    """Record the duration and the logged values of a completed step, and write the heartbeat."""
    assert run.state is not None and run.metrics is not None
    synchronize_gpus_if_due(run, run.state, step.number)
    now = time.perf_counter()
    seconds = run.pace.record_step_end(now)
    # A checkpoint after this step stores that the evaluation is due.
    run.progress.complete_step(evaluation_due=is_evaluation_due(run, run.state.loader.steps, step.number))
    values = step.values
    for hook in run.hooks:
        values = hook.collect_values() | values
    if run.trains:
        run.metrics.add_step(step.number, now, values, step.rate, seconds)
    else:
        run.metrics.add_step(step.number, now, values)
    if run.metrics.is_flush_due:
        run.metrics.flush()
    run.write_heartbeat(now)
    if run.profiler is not None:
        run.profiler.step()


def synchronize_gpus_if_due(run: RunContext, state: TrainState, number: int) -> None:
    """Synchronize the GPUs before the first timed step and before work between steps.

    A step only queues work on the GPUs. Without synchronization, the step time would cover only the queueing, and the
    work itself would be attributed to an evaluation or a checkpoint.
    """
    if not state.gpus:
        return
    begins_steady = run.pace.is_next_step_first_steady(run.total - number)
    ends_epoch = number == run.total or number % state.loader.steps == 0
    if begins_steady or ends_epoch or run.saver.vote.is_vote_due(number):
        for gpu in state.gpus:
            torch.cuda.synchronize(gpu)


def evaluate_epoch(run: RunContext, state: TrainState, evaluate: Evaluate) -> dict[str, float]:
    """Evaluate the model after the last completed step, and record the scores, if any.

    `evaluate` must call `Run.stop_if_requested` between two batches. After a stop request, the state before the
    evaluation is saved, and the evaluation is repeated when the run is resumed. The state after the last step of the
    run is always saved. All ranks must call this function.
    """
    saver = run.saver
    metrics = run.metrics
    is_last = run.step >= run.total
    assert metrics is not None
    metrics.flush()
    with run.progress.evaluation():  # includes all calls in which a rank may be lost
        saver.raise_if_diverged()
        # A checkpoint during the evaluation contains the snapshot, because an evaluation may change buffers.
        with state.buffer_snapshot():
            for part in state.parts:
                part.eval()
            scores = evaluate()
            score = saver.broadcast_score(scores)
            if is_last:
                saver.save_final_model(run.step)

    if scores:
        metrics.write_values(run.step, scores)
    saver.save_if_best(run.step, score)
    saver.checkpoint_or_stop(run.step, now=True)
    run.pace.exclude_pause()
    if is_last:
        run.stop_request.dump_stacks_after(None)  # reports and the model file may take longer than a step
    return scores
