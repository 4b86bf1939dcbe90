"""State of a training whose parameters and optimizer state servers keep, under the names of the full model."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from common.checkpoint.checkpointer import CheckpointState, LoadedCheckpoint
from common.checkpoint.train_state import TrainState
from common.data.loader import Loader
from common.distributed.parameter_server.worker import Worker


class ServedState(TrainState):
    """State of the network of a worker, as every other one has it between steps, when all pushes are applied.

    The `optimizer`, of the network's parameters, takes no step itself: it has the learning rate, and the servers' state
    while that is saved or loaded. So the number of servers may change from one attempt to the next.
    """

    optimizer: Optimizer

    def __init__(self, worker: Worker, optimizer: Optimizer, loader: Loader, **more: Any) -> None:
        super().__init__([worker.network], optimizer, loader, worker.world, replicated=True, **more)
        self.worker = worker

    @property
    def irreplaceable(self) -> bool:
        """True where this rank has a shard, which is lost with it."""
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

    def load_copy(self, loaded: LoadedCheckpoint) -> None:
        """Load all but the shards from another rank, whose network is older than the shards; the next pull brings them.

        Where that rank has taken a step more, this rank's server has all pushes of it, and takes it now.
        """
        super().load(loaded)
        self.worker.take_prepared_step()

    def leave_group(self, *, together: bool) -> None:
        """End the messages between workers and servers."""
        self.worker.stop_serving(together=together)

    def enter_group(self, done: int) -> None:
        """Begin them anew; of a step that has failed a server drops the pushes."""
        self.worker.start_serving(done)
