"""The training loop as an iterator over optimizer steps, with all that happens between two of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from common.checkpoint.train_state import TrainState
from common.data.rounds import Rounds
from common.data.shards import WINDOW
from common.measure.memory import read_peak_memory
from common.measure.metrics_log import MEAN
from common.measure.step_timing import StepTimes
from common.models.sample_dropout import list_dropout
from common.training import optimizers
from common.training.elastic.recovery import Recovery
from common.training.run_context import RunContext
from configs.elastic import find_elastic

Evaluate = Callable[[], dict[str, float]]


class Step:
    """Optimizer step: `with step:` around forward, backward and update.

    It counts when that block ends without an error, also where the scaler has skipped the update (fp16). Everything
    that would have to be done again if the step failed is in the block; running sums change behind it.
    """

    def __init__(
        self, run: RunContext, batch: Any, number: int, epoch: int, rate: float, recovery: Recovery | None = None
    ) -> None:
        self.run, self.batch, self.recovery = run, batch, recovery
        self.number = number
        """Counted from 1."""
        self.epoch = epoch
        """Counted from 0."""
        self.rate = rate
        """The learning rate, which is already set on the optimizer."""
        self.values: dict[str, Tensor | float | None] = {}
        self.committed = False
        self.done = False
        self.failure: BaseException | None = None
        """Why the step is discarded and done again, in an elastic run."""

    @property
    def x(self) -> Any:
        """Inputs [samples of this rank, ...]; None where this rank needs none."""
        return self.batch[0]

    @property
    def y(self) -> Any:
        """Targets [samples of this rank]; None where this rank needs none."""
        return self.batch[1]

    @property
    def mean_shard(self) -> float:
        """Samples of the batch, or of each of its microbatches, over all ranks, by the number of ranks.

        The sum of a rank's losses by this is its part of the mean loss: their mean over the ranks, whatever the shards.
        """
        assert self.run.state is not None and not isinstance(self.run.state.loader, Rounds)
        return self.run.state.loader.mean_shard

    def mark(self, name: str) -> None:
        """Note the time: "backward" where it begins, "end of backward" behind it."""
        if self.run.times is not None:
            self.run.times.mark(name)

    def log(self, **values: Tensor | float | None) -> None:
        """Add values to metrics.jsonl; tensors stay on their device. Where only one rank knows them, None elsewhere.

        In an elastic run all ranks know and average them, which costs least where they are logged before backward.
        """
        self.values |= values
        if self.recovery is not None and not self.committed:
            self.recovery.share(values)

    def commit(self) -> None:
        """Agree, just before the update, that no rank is lost; only in an elastic run (elastic=true).

        The means of the values logged so far are then known to all ranks; those logged later must be equal on all.
        """
        if self.recovery is not None:
            self.values |= self.recovery.commit()
            self.committed = True

    def __enter__(self) -> Step:
        if self.recovery is not None:
            self.recovery.begin_step()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if kind is None:
            self.done = True
            record_step(self.run, self)
        elif self.recovery is not None and self.recovery.is_loss(error):
            self.failure = error
            self.recovery.discard_step()
        return self.failure is not None


def iterate_steps(run: RunContext, state: TrainState, evaluate: Evaluate, source: int) -> Iterator[Step]:
    """Yield the optimizer steps that are left of a run, as `Run.steps` describes.

    `source` is the rank that knows the values of `Step.log`, or MEAN.
    """
    if run.state is not state:
        run.resume(state)
    run.open_metrics(state, source)
    record_shards(run)
    if source == MEAN and state.parts:
        sharded = (layer for layer in state.parts[0].children() if hasattr(layer, "unshard"))  # by fully_shard
        run.times = StepTimes(state.parts[0], run.device, sharded)
    settings = find_elastic(run.cfg)
    recovery = Recovery(run, state, settings) if settings else None
    try:
        while not run.complete:
            try:
                yield from iterate_to_evaluation(run, state, evaluate, recovery)
            except RuntimeError as error:
                if recovery is None or not recovery.is_loss(error):
                    raise
                recovery.join_generation()
    finally:
        if recovery is not None:
            recovery.close()


def iterate_to_evaluation(
    run: RunContext, state: TrainState, evaluate: Evaluate, recovery: Recovery | None
) -> Iterator[Step]:
    """Yield the steps up to the next evaluation, and evaluate; after the last one the run is complete."""
    if run.step < run.total and not run.saver.unevaluated:
        yield from iterate_epoch(run, state, recovery)
    scores = evaluate_epoch(run, state, evaluate)
    if scores:
        words = f"test_loss {scores['test_loss']:.4f}  test_accuracy {scores['test_accuracy']:.2%}"
        run.log_message(f"epoch {run.step / state.loader.steps:.3g}  step {run.step}  {words}")
    if run.step >= run.total:
        held = run.world.gather(read_peak_memory(run.device))
        if recovery is None or recovery.finish():
            run.memory = {f"rank {rank}": peak for rank, peak in enumerate(held)}
            run.scores, run.complete = scores, True


def iterate_epoch(run: RunContext, state: TrainState, recovery: Recovery | None) -> Iterator[Step]:
    """Yield the rest of the loader's epoch, up to the run's last step."""
    cfg, per_epoch = run.cfg, state.loader.steps
    for part in state.parts:
        part.train()
    dropout = list_dropout(state.parts)
    for batch in run.times.iterate(state.loader) if run.times else state.loader:
        rate = optimizers.compute_learning_rate(cfg.optim, run.step, run.total, cfg.batch)
        if state.optimizer is not None:
            optimizers.set_learning_rate(state.optimizer, rate)
        step = Step(run, batch, run.step + 1, run.step // per_epoch, rate, recovery)
        for layer in dropout:
            if isinstance(state.loader, Rounds):
                raise TypeError("dropout by position needs run.batches or run.microbatches, which know positions")
            layer.begin_step(step.epoch, state.loader.list_positions(run.step % per_epoch))
        yield step
        if step.failure is not None:
            raise step.failure
        if not step.done:
            raise RuntimeError(f"step {step.number} was not taken: the body of the loop is `with step:`")
        if run.saver.checkpoint_or_stop(step.number):  # a vote alone counts: ranks wait there for the slowest
            run.pace.interrupt()
        adapt_shards(run, step.number)
        if step.number == run.total and step.number % per_epoch:  # at an epoch's end the loader turns to the next one
            return
        if recovery is not None and step.number % per_epoch:  # there, an evaluation comes first
            recovery.leave_if_rank_joins()


def adapt_shards(run: RunContext, number: int) -> None:
    """With shards=auto, let the shards follow what the newest steps took each rank, after every WINDOW steps."""
    if run.shards is None or run.times is None or number % WINDOW or number == run.total:
        return
    seconds = run.times.measure_own_seconds(WINDOW)
    if seconds is not None and run.shards.follow(number, seconds):
        record_shards(run)


def record_shards(run: RunContext) -> None:
    """Write the shards that run.shards chose to metrics.jsonl. All ranks call it after the same step."""
    if run.shards is not None and run.metrics is not None:
        run.metrics.write(run.step, run.shards.values)


def record_step(run: RunContext, step: Step) -> None:
    """Record a step that is done: its time and values, and the heartbeat."""
    assert run.state is not None and run.metrics is not None
    synchronize_gpus_if_due(run, run.state, step.number)
    now = time.perf_counter()
    run.pace.note_step_end(now)
    run.step = step.number
    run.saver.stop.all_saved = False
    run.metrics.add(step.number, now, step.values)
    if run.metrics.is_due:
        run.metrics.flush()
    run.write_heartbeat(now)
    if run.profiler is not None:
        run.profiler.step()


def synchronize_gpus_if_due(run: RunContext, state: TrainState, number: int) -> None:
    """Wait for the GPUs where the steady steps begin and where something else follows a step.

    A step only queues work on them: without waiting, its time would be that of queueing, and the rest would count as
    time of an evaluation or a checkpoint.
    """
    if not state.gpus:
        return
    steady = run.pace.is_steady_next(run.total - number)
    ends = number == run.total or number % state.loader.steps == 0
    if steady or ends or run.saver.vote.is_due(number):
        for gpu in state.gpus:
            torch.cuda.synchronize(gpu)


def evaluate_epoch(run: RunContext, state: TrainState, evaluate: Evaluate) -> dict[str, float]:
    """Measure the model after the newest step and record the scores, if there are any. All ranks call it.

    `evaluate` calls `Run.stop_if_requested` between two batches: a stop request saves the state before the evaluation,
    which is done again after a resume. That after the last step is saved in any case.
    """
    saver, metrics, last = run.saver, run.metrics, run.step >= run.total
    assert metrics is not None
    metrics.flush()
    saver.unevaluated = True  # also where a rank is lost in what follows
    saver.raise_if_diverged()
    state.snapshot_buffers()
    for part in state.parts:
        part.eval()
    scores = evaluate()
    if last:
        saver.save_last(run.step)
    state.drop_buffer_snapshot()
    saver.unevaluated = False
    if scores:
        metrics.write(run.step, scores)
    saver.save_best(run.step, scores)
    saver.checkpoint_or_stop(run.step, now=True)
    run.pace.interrupt()
    saver.stop.all_saved = last
    if last:  # reports and the model file may take longer than a step
        saver.stop.dump_stacks_after(None)
    return scores
