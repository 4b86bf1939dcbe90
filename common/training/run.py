"""The run as an experiment uses it: steps, report, and all of RunContext."""

from __future__ import annotations

from collections.abc import Iterator

from common.checkpoint.train_state import TrainState
from common.measure.metrics_log import MEAN
from common.runs.result import Report
from common.training import final_report, loop
from common.training.loop import Evaluate, Step
from common.training.run_context import RunContext


class Run(RunContext):
    """One rank's interface to everything except the method. Experiments set no attributes on it.

    All ranks call `resume`, `steps` and `report`, in this order.
    """

    def steps(self, state: TrainState, evaluate: Evaluate = dict, *, loss: int = MEAN) -> Iterator[Step]:
        """Yield the remaining optimizer steps, each to be run in `with step:`, and evaluate after each epoch.

        The learning rate is set before each step. Between two steps, this rank writes its heartbeat and, every 0.5 to
        2 s, all ranks agree whether to save or to stop. `evaluate` is called with all parts of the model in eval mode
        and returns test_loss, test_accuracy and test_samples; without it there are no scores. `loss` is the rank that
        knows the values of `Step.log`; with MEAN, every rank has its own values and their means are written.

        Raises StopRequested after a checkpoint if any rank has a stop request, and UserError if the loss is NaN or
        infinite.
        """
        return loop.iterate_steps(self, state, evaluate, loss)

    def report(self, *reports: Report) -> None:
        """Write result.json and the trained model, and print the final table, after the loop over `steps`.

        Raises RuntimeError if steps remain, and UserError if the disk is full.
        """
        if not self.complete:
            raise RuntimeError(
                f"run.report() called after step {self.step} of {self.total}; call it after the loop over "
                "run.steps(...) has finished"
            )
        if self.world.is_main:
            self.finished = True
            self.saver.stop_request.can_stop_immediately = False
            final_report.write_final_report(self, reports)
