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
    """Interface of one rank for everything that is not the method. An experiment sets nothing on it.

    `resume`, `steps` and `report` are called by all ranks, in this order.
    """

    def steps(self, state: TrainState, evaluate: Evaluate = dict, *, loss: int = MEAN) -> Iterator[Step]:
        """Yield the optimizer steps that are left, each to be taken in `with step:`, and evaluate after each epoch.

        Before a step the learning rate is set. Between two steps come heartbeat and, every 0.5 to 2 s, the agreed
        decision of all ranks to save or to stop. `evaluate` finds all parts of the model in eval mode and returns
        test_loss, test_accuracy and test_samples; without it there are no scores. `loss` is the rank that knows the
        values of `Step.log`; with MEAN every rank has its own and their means are written.

        Raises StopRequested after a checkpoint, when any rank has a stop request, and UserError for a loss that is NaN
        or infinite.
        """
        return loop.iterate_steps(self, state, evaluate, loss)

    def report(self, *reports: Report) -> None:
        """Write result.json and the trained model, and show the final table, once the loop over `steps` is over.

        Raises RuntimeError before that, UserError where the disk takes no more.
        """
        if not self.complete:
            raise RuntimeError(
                f"run.report() after step {self.step} of {self.total}: call it when the loop over run.steps(...) has "
                "come to its end"
            )
        if self.world.is_main:
            self.finished, self.saver.stop.all_saved = True, False
            final_report.write_final_report(self, reports)
