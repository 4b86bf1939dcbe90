"""The class `Run`, through which an experiment's `main` iterates over training steps and reports results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from common.checkpoint.train_state import TrainState
from common.data.loader import Loader
from common.measure.metrics_log import MEAN
from common.models.sample_dropout import list_dropout_layers
from common.ranks.ranks import Ranks
from common.ranks.rendezvous import World
from common.runs.result import Report
from common.training import final_report, loop
from common.training.dropout_positions import DropoutPositions
from common.training.evaluate import Predict, StagedModel, score_replicated, score_stages
from common.training.loop import Step
from common.training.measurement_points import MeasurementPoints
from common.training.run_context import Evaluate, RunContext


class Run(RunContext):
    """A rank's interface to the data, training loop, checkpoints, and log of a run.

    All ranks must call `register`, `steps` and `report` in this order. Experiments must not set attributes of a `Run`.
    """

    def register(
        self,
        model: nn.Module | StagedModel,
        optimizer: Optimizer,
        batches: Loader,
        *,
        replicated: bool = False,
        peers: World | None = None,
        scaler: GradScaler | None = None,
        predict: Predict | None = None,
    ) -> None:
        """Register what is trained, saved in checkpoints, and evaluated.

        `model`: the model of this rank, not wrapped, so that its parameters have the names of the full model. A model
            that is split into stages provides the interface of `StagedModel`, or contains the layers of this rank only
            and is evaluated by the argument of `steps`.
        `replicated`: True if every rank holds the full model, as in data parallelism.
        `peers`: the ranks that hold the same stages as this rank. Pass `peers` only if other ranks hold other stages.
        `scaler`: gradient scaler, whose state must be the same on all ranks.
        `predict`: function that computes the outputs of a replicated model in an evaluation, by default the model
            itself.
        """
        evaluate: Evaluate = dict
        loss_rank = MEAN
        has_stages = peers is not None
        if isinstance(model, nn.Module):
            parts = [model]
            if replicated or self.world.size == 1:
                evaluate = partial(score_replicated, model, self, predict)
        else:
            parts = list(model.local_stages.values())
            evaluate = partial(score_stages, model, self, peers)
            loss_rank = model.last_rank
            has_stages = self.world.size > 1
        holders = self.ranks if replicated else None  # the ranks that hold the same parts as this rank
        if peers is not None:
            holders = Ranks(peers)
        state = TrainState(
            parts, optimizer, batches, peers=holders, scaler=scaler, has_stages=has_stages, local=self.local_parts
        )
        self._add_dropout_hook(parts)
        self.set_up_training(state, evaluate, loss_rank)

    def register_state(self, state: TrainState) -> None:
        """Register a state with its own rules for saving and loading, instead of calling `register`.

        The state must be replicated on all ranks. The model that `TrainState.prepare_evaluation` returns is evaluated.
        """

        def evaluate() -> dict[str, float]:
            return score_replicated(state.prepare_evaluation(), self)

        self._add_dropout_hook(state.parts)
        self.set_up_training(state, evaluate, MEAN)

    def _add_dropout_hook(self, parts: Sequence[nn.Module]) -> None:
        dropout_layers = list_dropout_layers(parts)
        if dropout_layers:
            self.add_hook(DropoutPositions(self, dropout_layers))

    def steps(self, evaluate: Evaluate | None = None) -> Iterator[Step]:
        """Yield the remaining optimizer steps, and evaluate the model after each epoch.

        The learning rate is set before each step. Between two steps, this rank writes its heartbeat. Every 0.5 to 2 s,
        all ranks agree on whether to save a checkpoint or to stop. If the experiment can be elastic, the body of the
        loop must be inside `with step:`.

        `evaluate` replaces the evaluation of the registered model. It is called with all parts of the model in eval
        mode, and must return a dict with test_loss, test_samples and, if known, test_accuracy, or an empty dict.

        If any rank has received a stop request, all ranks save a checkpoint and raise StopRequested. Raises UserError
        if the loss is NaN or infinite, and RuntimeError if a loop over the steps was started before.
        """
        return loop.iterate_steps(self, evaluate or self.evaluate)

    def repeat(self, points: Sequence[Any], **tensors: Tensor) -> Iterator[Step]:
        """Yield one step for each point of a measurement, in several rounds over all points.

        `Step.batch` is the point, and `Step.epoch` is the round, counted from 0. `tensors` contain the measured values,
        which the caller updates in place; those of rank 0 are saved in checkpoints. The values that rank 0 passes to
        `Step.log` are written to metrics.jsonl. Checkpoints, stop requests, and heartbeats work as in `steps`. Raises
        RuntimeError if there are no `tensors`, or after `register` or `repeat` was called.
        """
        if not tensors:
            raise RuntimeError(
                "a resumed run would lose the measurements; pass the tensors that contain them, for example "
                "run.repeat(points, measured=table)"
            )
        state = TrainState([], None, MeasurementPoints(points), tensors=tensors)
        self.set_up_training(state, dict, 0)
        return loop.iterate_steps(self, self.evaluate)

    def report(self, *reports: Report) -> None:
        """Write result.json and the trained model, and print the final table.

        Call this method after the loop over `steps`. Raises RuntimeError if steps remain, and UserError if the disk is
        full.
        """
        if not self.complete:
            raise RuntimeError(
                f"run.report() was called after step {self.step} of {self.total}; call it after the loop over "
                "run.steps(...) has finished"
            )
        hook_reports = [hook.gather_report(self.world) for hook in self.hooks]
        if self.world.is_main:
            self.finished = True
            final_report.write_final_report(self, [*hook_reports, *reports])
