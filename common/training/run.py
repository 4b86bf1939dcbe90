"""The class `Run`, through which an experiment's `main` iterates over training steps and reports results."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from common.checkpoint.train_state import TrainState
from common.measure.metrics_log import MEAN
from common.runs.result import Report
from common.training import final_report, loop
from common.training.evaluate import score_replicated
from common.training.loop import Evaluate, Step
from common.training.run_context import RunContext


class Run(RunContext):
    """A rank's interface to the data, training loop, checkpoints, and log of a run.

    All ranks must call `steps` and then `report`. Calling `resume` before `steps` is optional. Experiments must not set
    attributes of a `Run`.
    """

    def steps(self, state: TrainState, evaluate: Evaluate | None = None, *, loss: int = MEAN) -> Iterator[Step]:
        """Yield the remaining optimizer steps, and evaluate the model after each epoch.

        The body of the loop must be inside `with step:`. The learning rate is set before each step. Between two steps,
        this rank writes its heartbeat. Every 0.5 to 2 s, all ranks agree on whether to save a checkpoint or to stop.

        `evaluate` is called with all parts of the model in eval mode, and must return a dict with test_loss,
        test_accuracy, and test_samples. By default, a model that is replicated on all ranks is evaluated by
        `score_replicated`, and no scores are computed for any other state. `loss` is the rank that knows the values
        passed to `Step.log`. With `loss=MEAN`, every rank has its own values, and the means over the ranks are logged.

        If any rank has received a stop request, all ranks save a checkpoint and raise StopRequested. Raises UserError
        if the loss is NaN or infinite.
        """
        if evaluate is None:
            evaluate = partial(score_replicated, state.parts[0], self) if state.is_replicated else dict
        return loop.iterate_steps(self, state, evaluate, loss)

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
        if self.world.is_main:
            self.finished = True
            self.saver.stop_request.can_stop_immediately = False
            final_report.write_final_report(self, reports)
