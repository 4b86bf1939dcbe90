"""Hook that makes dropout independent of the division of a batch into shards and microbatches."""

from __future__ import annotations

from collections.abc import Sequence

from common.data.loader import Loader
from common.models.sample_dropout import SampleDropout
from common.training.hooks import StepHook
from common.training.run_context import RunContext


class DropoutPositions(StepHook):
    """Hook that sets the positions of a step's samples in dropout layers."""

    def __init__(self, run: RunContext, layers: Sequence[SampleDropout]) -> None:
        self.run = run
        self.layers = layers

    def before_step(self) -> None:
        """Set the positions of this rank's samples, from which the layers draw their masks."""
        assert self.run.state is not None and isinstance(self.run.state.loader, Loader)
        loader = self.run.state.loader
        epoch, step_of_epoch = divmod(self.run.step, loader.steps)
        for layer in self.layers:
            layer.set_positions(epoch, loader.list_sample_positions(step_of_epoch))
