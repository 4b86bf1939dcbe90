"""Training state of local SGD, which contains the mean parameters and the parameters of each worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import vector_to_parameters
from torch.optim import Optimizer

from common.checkpoint import extension, state_dicts
from common.checkpoint.checkpointer import CheckpointState
from common.checkpoint.loading import LoadedCheckpoint
from common.checkpoint.train_state import TrainState
from common.data.loader import Loader
from common.techniques.local_sgd.worker import LocalWorker


class LocalState(TrainState):
    """Training state of a local SGD worker.

    The model in a checkpoint is the mean over the workers, which is also the model that is evaluated. In addition, each
    rank saves its own parameters and optimizer state, which are needed to resume between two exchanges. A checkpoint
    can therefore be loaded only by the same number of ranks.
    """

    optimizer: Optimizer

    def __init__(self, worker: LocalWorker, optimizer: Optimizer, loader: Loader, **options: Any) -> None:
        super().__init__(
            [worker.network], optimizer, loader, peers=worker.ranks, tensors=worker.shared_tensors, **options
        )
        self.worker = worker

    @torch.no_grad()
    def collect_state(self) -> CheckpointState:
        """Return the state to save. All ranks must call this method between two steps."""
        worker_state = {
            "vectors": self.worker.collect_local_vectors(),
            "optimizer": state_dicts.collect_optimizer_state(self.optimizer, self.parameters),
        }
        state = super().collect_state()
        means = {name: torch.empty_like(parameter) for name, parameter in self.parameters}
        vector_to_parameters(self.worker.average_parameters(), means.values())
        model = state.model | means if state.model else {}  # only one rank saves the model
        return replace(state, model=model, optimizer={}, local=state.local | {"worker": worker_state})

    def prepare_evaluation(self) -> nn.Module:
        """Return a network with the mean parameters of the workers. All ranks must call this method."""
        return self.worker.build_average_network()

    def check_number_of_ranks(self, loaded: LoadedCheckpoint) -> None:
        """Raise UserError if the checkpoint was saved by a different number of ranks."""
        extension.check_number_of_ranks(loaded.processes, self.worker.ranks.current.size)

    def load(self, loaded: LoadedCheckpoint) -> None:
        """Load a checkpoint saved by the same number of ranks.

        Raises UserError if the checkpoint belongs to a different model.
        """
        super().load(loaded)
        assert loaded.local is not None
        worker_state = loaded.local["worker"]
        self.worker.load_local_vectors(worker_state["vectors"])
        state_dicts.load_optimizer_state(self.optimizer, self.parameters, worker_state["optimizer"])
