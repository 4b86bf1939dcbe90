"""Local SGD worker, which exchanges its parameter changes with all other workers.

Each vector [n] in this module holds one number per parameter, in the order of `network.parameters()`. The reference is
the parameter vector that all workers share after an outer step.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer

from common.ranks.ranks import Ranks
from common.system.errors import UserError
from common.techniques.local_sgd.exchange import Exchange

# Indices of `LocalWorker.counts`
EXCHANGES = 0
EXCHANGE_BYTES = 1
EXCHANGE_STEP = 2


class LocalWorker:
    """A rank that trains with local SGD and does not communicate between two exchanges.

    `momentum_of` determines how an exchange treats the optimizer's momentum. With "own", each worker keeps its
    momentum. With "averaged", the momentum is averaged over the workers. With "reset", the whole optimizer state is
    cleared.
    """

    def __init__(
        self, network: nn.Module, optimizer: Optimizer, ranks: Ranks, exchange: Exchange, momentum_of: str
    ) -> None:
        self.network = network
        self.optimizer = optimizer
        self.ranks = ranks
        self.momentum_of = momentum_of
        self.exchange = exchange
        self.reference = self.flatten_parameters()
        """Parameters [n] after the last outer step, identical on all workers."""
        self.sent = self.reference
        """This worker's parameters [n] at the start of the last exchange."""
        self.received = self.reference
        """Mean difference [n] returned by the last exchange."""
        self.momentum = torch.zeros_like(self.reference)
        """Momentum [n] of the outer steps, identical on all workers."""
        self.counts = torch.zeros(3, dtype=torch.int64)
        """Number of exchanges, number of bytes that this worker has sent, and the step after which the pending exchange
        started (0 if no exchange is pending)."""
        self.average = copy.deepcopy(network)
        self.seconds = 0.0
        """Time in seconds that this worker has spent in communication in this attempt."""

    @property
    def exchange_step(self) -> int:
        """Step after which the pending exchange started; 0 if no exchange is pending."""
        return int(self.counts[EXCHANGE_STEP])

    @property
    def awaits_outer_step(self) -> bool:
        """True from the start of an exchange until the outer step that applies the mean difference."""
        return self.exchange_step > 0

    @torch.no_grad()
    def flatten_parameters(self) -> Tensor:
        """Return a copy of this worker's parameters [n]."""
        return parameters_to_vector(self.network.parameters())

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Replace each gradient with its mean over all workers, so that the next step equals a step of DDP.

        Missing gradients are treated as zeros, because the vectors of all workers must have the same length. All
        workers must call this method.
        """
        trained = self._list_trainable_parameters()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        for parameter, mean in zip(trained, self._average_tensors(gradients), strict=True):
            parameter.grad = mean

    def set_reference_to_parameters(self) -> None:
        """Set the reference to the current parameters, which must be identical on all workers."""
        self.reference.copy_(self.flatten_parameters())

    # ---- steps of an exchange

    @torch.no_grad()
    def begin_exchange(self, step: int) -> None:
        """Start exchanging the difference between the reference and this worker's parameters.

        All workers must call this method after the same `step`.
        """
        with self.count_traffic():
            self.sent = self.flatten_parameters()
            self.exchange.begin_exchange(self.reference - self.sent)
        self.counts[EXCHANGES] += 1
        self.counts[EXCHANGE_STEP] = step

    @torch.no_grad()
    def wait_for_exchange(self) -> None:
        """Wait for the exchange in flight, if any, and store the mean difference for the outer step.

        All workers must call this method.
        """
        if self.exchange.in_flight:
            with self.count_traffic():
                self.received = self.exchange.finish_exchange()

    def finish_exchange(self) -> Tensor:
        """Finish the pending exchange, and return the mean difference [n] over all workers.

        All workers must call this method, and then apply the difference in an outer step.
        """
        self.wait_for_exchange()
        self.counts[EXCHANGE_STEP] = 0
        return self.received

    @contextlib.contextmanager
    def count_traffic(self) -> Iterator[None]:
        """Add the bytes sent and the seconds spent in the `with` block to this worker's totals."""
        bytes_before = self.exchange.bytes_sent
        start = time.perf_counter()
        yield
        self.counts[EXCHANGE_BYTES] += self.exchange.bytes_sent - bytes_before
        self.seconds += time.perf_counter() - start

    @torch.no_grad()
    def rebase_onto_reference(self) -> None:
        """Set the parameters to the new reference, plus this worker's local changes since the exchange started.

        If a worker has taken no steps since the exchange started, its parameters are bitwise equal to the reference.
        All workers must call this method after the outer step.
        """
        local_steps = self.flatten_parameters() - self.sent
        vector_to_parameters(self.reference + local_steps, self.network.parameters())
        if self.momentum_of == "reset":
            self.optimizer.state.clear()
        elif self.momentum_of == "averaged":
            moments = self._find_moments()
            for moment, mean in zip(moments, self._average_tensors(moments), strict=True):
                moment.copy_(mean)

    def _find_moments(self) -> list[Tensor]:
        """Return the moments in the optimizer's state; a moment is a tensor with the shape of its parameter.

        A parameter that has never had a gradient has no state. Zeros are returned in place of its moments, so that all
        workers return the same number of tensors; the optimizer's state does not change. The names of the moments are
        gathered from all workers, because a worker without any gradient does not know these names. All workers must
        call this method. Raises UserError on all workers if no worker has any moments.

        Both of Adam's moments are averaged. If only the first moment were averaged, a worker that has had no gradient
        would divide the mean first moment by the square root of its own second moment, which is almost zero. This
        worker would then take a huge step.
        """
        trained = self._list_trainable_parameters()
        local_names: dict[str, None] = {}  # an ordered set
        for parameter in trained:
            for name, value in self.optimizer.state.get(parameter, {}).items():
                if is_moment(value, parameter):
                    local_names[name] = None
        with self.count_traffic():
            gathered = self.ranks.current.all_gather(list(local_names))
        names: dict[str, None] = {}
        for worker_names in gathered:
            names |= dict.fromkeys(worker_names)
        if not names:
            kind = type(self.optimizer).__name__
            raise UserError(f"momentum_of=averaged: {kind} has no momentum in its state; use momentum_of=own")

        moments = []
        for parameter in trained:
            state = self.optimizer.state.get(parameter, {})
            for name in names:
                moment = state.get(name)
                moments.append(moment if is_moment(moment, parameter) else torch.zeros_like(parameter))
        return moments

    def _list_trainable_parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.network.parameters() if parameter.requires_grad]

    def _average_tensors(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean of each tensor over all workers. All workers must call this method."""
        vector = torch.cat([tensor.flatten() for tensor in tensors])
        with self.count_traffic():
            means = self.exchange.average_uncompressed(vector)
        parts = means.split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    # ---- between exchanges

    @torch.no_grad()
    def average_parameters(self) -> Tensor:
        """Return the parameters [n] averaged over all workers, without modifying any worker's parameters.

        All workers must call this method.
        """
        total = self.flatten_parameters()
        dist.all_reduce(total)
        return total.div_(self.ranks.current.size)

    @torch.no_grad()
    def build_average_network(self) -> nn.Module:
        """Return a copy of the network in eval mode, whose parameters are the means over all workers.

        All workers must call this method.
        """
        vector_to_parameters(self.average_parameters(), self.average.parameters())
        for mean_buffer, buffer in zip(self.average.buffers(), self.network.buffers(), strict=True):
            mean_buffer.copy_(buffer)
        return self.average.eval()

    # ---- state of a checkpoint

    @property
    def shared_tensors(self) -> dict[str, Tensor]:
        """Tensors that are identical on all workers and that checkpoints save and load in place."""
        return {"reference": self.reference, "momentum": self.momentum, "counts": self.counts}

    def collect_local_vectors(self) -> dict[str, Any]:
        """Return the vectors that differ between workers, after waiting for any exchange in flight.

        All workers must call this method.
        """
        self.wait_for_exchange()
        vectors = {"parameters": self.flatten_parameters()}
        if self.awaits_outer_step:
            vectors |= {"sent": self.sent, "received": self.received}
        return vectors | self.exchange.collect_state()

    @torch.no_grad()
    def load_local_vectors(self, saved: dict[str, Any]) -> None:
        """Load vectors returned by `collect_local_vectors`."""
        vectors = {name: vector.to(self.reference.device) for name, vector in saved.items()}
        vector_to_parameters(vectors["parameters"], self.network.parameters())
        self.sent = vectors.get("sent", self.sent)
        self.received = vectors.get("received", self.received)
        self.exchange.load_state(vectors)


def is_moment(value: object, parameter: Tensor) -> TypeGuard[Tensor]:
    """Return True if a value in the optimizer's state is a tensor with the shape of the parameter."""
    return isinstance(value, Tensor) and value.shape == parameter.shape
