"""Training state of a run with parameter servers, which hold the parameters and the optimizer state.

Checkpoints contain the full tensors under the names that they have in the full model.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from common.checkpoint.checkpointer import CheckpointState
from common.checkpoint.loading import LoadedCheckpoint
from common.checkpoint.train_state import TrainState
from common.data.loader import Loader
from common.techniques.parameter_server.worker import ParameterServerRank
from common.training.hooks import StepHook
from common.training.run import Run


class ServingHook(StepHook):
    """Hook that serves all workers of a parameter server from the first step to the last evaluation."""

    def __init__(self, run: Run, worker: ParameterServerRank) -> None:
        self.run = run
        self.worker = worker

    def on_start(self) -> None:
        """Start serving after the completed steps."""
        self.worker.start_serving(self.run.step)

    def on_end(self) -> None:
        """Stop serving, unless the run has failed and the other ranks no longer answer."""
        if self.run.complete:
            self.worker.stop_serving()


class ServerWorkerState(TrainState):
    """Training state of a parameter-server worker.

    Between steps, when all pushes have been applied, the state is equal on all workers. This worker's `optimizer` takes
    no steps. The `optimizer` holds the learning rate and, only while a checkpoint is saved or loaded, the full
    optimizer state of all servers. The number of servers may therefore differ between attempts.
    """

    optimizer: Optimizer

    def __init__(self, worker: ParameterServerRank, optimizer: Optimizer, loader: Loader, **options: Any) -> None:
        super().__init__([worker.network], optimizer, loader, peers=worker.ranks, **options)
        self.worker = worker

    @property
    def irreplaceable(self) -> bool:
        """True if this rank is a server, because no other rank holds its shard of the parameters."""
        return self.worker.server is not None

    def prepare_evaluation(self) -> nn.Module:
        """Return the network with the newest parameters of all servers. All ranks must call this method."""
        self.worker.fetch_parameters()  # replaces the parameters of this rank's last pull
        return self.worker.network

    def collect_state(self) -> CheckpointState:
        """Return the state to save. All ranks must call this method between steps."""
        try:
            self.worker.fetch_parameters()
            self.worker.fetch_optimizer_state(self.optimizer)
            return super().collect_state()
        finally:
            self.optimizer.state.clear()

    def load(self, loaded: LoadedCheckpoint) -> None:
        """Load a checkpoint, which may have been saved with a different number of servers.

        Raises UserError if the checkpoint belongs to a different model.
        """
        super().load(loaded)
        self.worker.load_server_shard(self.optimizer)
        self.optimizer.state.clear()

    def load_peer_state(self, loaded: LoadedCheckpoint) -> None:
        """Load another rank's state, but keep this rank's shard of the parameters, which is newer.

        The next pull updates the parameters of the network. If the other rank is one step ahead, this rank's server has
        already received all pushes of that step, and applies them now.
        """
        super().load(loaded)
        self.worker.apply_prepared_step()

    def leave_group(self, *, together: bool) -> None:
        """Stop this rank's exchange of messages between workers and servers."""
        self.worker.stop_serving(together=together)

    def enter_group(self, completed_steps: int) -> None:
        """Restart the exchange of messages. A server discards the pushes of a failed step."""
        self.worker.start_serving(completed_steps)


def register_worker(run: Run, worker: ParameterServerRank, optimizer: Optimizer, batches: Loader) -> None:
    """Register a parameter-server worker with a run, which then starts and stops the server of this rank.

    `optimizer` only provides the learning rate of a step.
    """
    run.add_hook(ServingHook(run, worker))
    run.register_state(ServerWorkerState(worker, optimizer, batches))
    if run.gradient_norm is not None:  # the optimizers of the servers do not know the gradients of a worker
        worker.call_before_push(run.gradient_norm.measure_norm)
