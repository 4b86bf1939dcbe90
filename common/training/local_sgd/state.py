"""State of a training whose ranks hold different parameters: the mean as the model, and each rank's own beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils import vector_to_parameters
from torch.optim import Optimizer

from common.checkpoint import state_dicts
from common.checkpoint.checkpointer import CheckpointState, LoadedCheckpoint
from common.checkpoint.train_state import TrainState
from common.core.errors import UserError
from common.core.text import format_count
from common.data.loader import Loader
from common.training.local_sgd.worker import LocalWorker


class LocalState(TrainState):
    """State of a worker of local SGD.

    The model of a checkpoint is the mean over the workers, as it is evaluated. Parameters and optimizer of each worker
    are its own part, without which nobody could go on between two exchanges: so as many ranks as saved it must load it.
    """

    optimizer: Optimizer

    def __init__(self, worker: LocalWorker, optimizer: Optimizer, loader: Loader, **more: Any) -> None:
        super().__init__(
            [worker.network], optimizer, loader, worker.world, replicated=True, tensors=worker.shared, **more
        )
        self.worker = worker

    @torch.no_grad()
    def collect_state(self) -> CheckpointState:
        """Return the state to save. All ranks call it, between steps."""
        own = {"vectors": self.worker.collect_own()}
        own["optimizer"] = state_dicts.collect_optimizer_state(self.optimizer, self.parameters)
        found = super().collect_state()
        means = {name: torch.empty_like(value) for name, value in self.parameters}
        vector_to_parameters(self.worker.average_parameters(), means.values())
        found.model |= means if found.model else {}
        found.optimizer = {}
        found.local["worker"] = own
        return found

    def check_ranks(self, loaded: LoadedCheckpoint) -> None:
        """Raise UserError for a checkpoint of another number of ranks."""
        if not loaded.resumes_exactly:
            saved = format_count(loaded.processes, "rank")
            raise UserError(
                f"the checkpoint is of {saved} with parameters of their own, and here are {self.worker.world.size}; "
                f"go on with {saved}, or begin a new run from their mean: weights=CHECKPOINT_FOLDER"
            )

    def load(self, loaded: LoadedCheckpoint) -> None:
        """Load a checkpoint of as many ranks. Raises UserError if it is of another model."""
        super().load(loaded)
        assert loaded.local is not None
        own = loaded.local["worker"]
        self.worker.load_own(own["vectors"])
        state_dicts.load_optimizer_state(self.optimizer, self.parameters, own["optimizer"])
