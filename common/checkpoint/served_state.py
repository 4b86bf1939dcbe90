"""State of a training whose parameters and optimizer state are stored on servers, by the full model's names."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from common.checkpoint.checkpointer import CheckpointState, LoadedCheckpoint
from common.checkpoint.train_state import TrainState
from common.data.loader import Loader
from common.distributed.parameter_server.worker import ServerWorker


class ServedState(TrainState):
    """State of a parameter-server worker's network; equal on all workers between steps, after all pushes are applied.

    The `optimizer` of the network's parameters takes no steps. It holds the learning rate, and the servers' state while
    that is saved or loaded, so the number of servers may change between attempts.
    """

    optimizer: Optimizer

    def __init__(self, worker: ServerWorker, optimizer: Optimizer, loader: Loader, **options: Any) -> None:
        super().__init__([worker.network], optimizer, loader, worker.world, replicated=True, **options)
        self.worker = worker

    @property
    def irreplaceable(self) -> bool:
        """True if this rank holds a shard, which no other rank has."""
        return self.worker.server is not None

    def collect_state(self) -> CheckpointState:
        """Return the state to save. All ranks call it, between steps."""
        try:
            self.worker.fetch_parameters()
            self.worker.fetch_optimizer_state(self.optimizer)
            return super().collect_state()
        finally:
            self.optimizer.state.clear()

    def load(self, loaded: LoadedCheckpoint) -> None:
        """Load a checkpoint of any number of servers. Raises UserError if it is of another model."""
        super().load(loaded)
        self.worker.load_server_from(self.optimizer)
        self.optimizer.state.clear()

    def load_peer_state(self, loaded: LoadedCheckpoint) -> None:
        """Load another rank's state except the shards, which are newer; the next pull updates the network.

        If that rank has taken one more step, this rank's server has received all pushes of it, and takes it now.
        """
        super().load(loaded)
        self.worker.take_prepared_step()

    def leave_group(self, *, together: bool) -> None:
        """Stop the messages between workers and servers."""
        self.worker.stop_serving(together=together)

    def enter_group(self, completed_steps: int) -> None:
        """Restart the messages; a server drops the pushes of a failed step."""
        self.worker.start_serving(completed_steps)
