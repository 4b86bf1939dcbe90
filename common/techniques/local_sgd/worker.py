"""A worker of local SGD: its parameters, the common reference parameters, and the exchange between the workers.

All vectors [n] contain the n parameters of the network, in its order.
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

from common.ranks.rendezvous import World
from common.system.errors import UserError
from common.techniques.local_sgd.exchange import Exchange

# Positions in `LocalWorker.counts`
EXCHANGES = 0
EXCHANGE_BYTES = 1
EXCHANGE_STEP = 2


class LocalWorker:
    """Parameters of this rank, which trains alone between two exchanges.

    `momentum_of` determines what an exchange does to the optimizer's momentum: each worker keeps its own (own), it is
    averaged (averaged), or the whole optimizer state is reset (reset).
    """

    def __init__(
        self, network: nn.Module, optimizer: Optimizer, world: World, exchange: Exchange, momentum_of: str
    ) -> None:
        self.network = network
        self.optimizer = optimizer
        self.world = world
        self.momentum_of = momentum_of
        self.exchange = exchange
        self.reference = self.flatten()
        """Parameters after the last outer step, the same on all workers."""
        self.sent = self.reference
        """This worker's parameters when the last exchange started."""
        self.received = self.reference
        """Mean difference that the last exchange returned."""
        self.momentum = torch.zeros_like(self.reference)
        """Momentum of the outer steps, the same on all workers."""
        self.counts = torch.zeros(3, dtype=torch.int64)
        """Number of exchanges, bytes this worker sent for them, and the step of the exchange that awaits its outer
        step (0: none)."""
        self.average = copy.deepcopy(network)
        self.seconds = 0.0
        """Seconds that this attempt waited for exchanges."""

    @property
    def exchange_step(self) -> int:
        """Step after which the exchange started that awaits its outer step; 0 if there is none."""
        return int(self.counts[EXCHANGE_STEP])

    @property
    def awaits_outer_step(self) -> bool:
        """True from the start of an exchange until its outer step."""
        return self.exchange_step > 0

    @torch.no_grad()
    def flatten(self) -> Tensor:
        """Return a copy of this worker's parameters [n]."""
        return parameters_to_vector(self.network.parameters())

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Replace the gradients by their means over all workers, so that the next step equals that of DDP.

        A missing gradient counts as zero, because the vectors of all workers must have the same length.
        """
        trained = self._list_trained()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        for parameter, mean in zip(trained, self._average(gradients), strict=True):
            parameter.grad = mean

    def update_reference(self) -> None:
        """Use the current parameters, which are the same on all workers, as the reference."""
        self.reference.copy_(self.flatten())

    # ---- an exchange

    @torch.no_grad()
    def begin_exchange(self, step: int) -> None:
        """Start to send the difference between reference and parameters. All workers call it after a step."""
        with self.count_traffic():
            self.sent = self.flatten()
            self.exchange.begin(self.reference - self.sent)
        self.counts[EXCHANGES] += 1
        self.counts[EXCHANGE_STEP] = step

    @torch.no_grad()
    def wait_for_exchange(self) -> None:
        """Wait for an exchange in flight and keep its mean for the outer step. All workers call it."""
        if self.exchange.in_flight:
            with self.count_traffic():
                self.received = self.exchange.finish()

    def finish_exchange(self) -> Tensor:
        """Return the mean difference [n] for the outer step, which must follow. All workers call it."""
        self.wait_for_exchange()
        self.counts[EXCHANGE_STEP] = 0
        return self.received

    @contextlib.contextmanager
    def count_traffic(self) -> Iterator[None]:
        """Add the bytes and seconds of the block to those of exchanges."""
        bytes_before = self.exchange.bytes_sent
        start = time.perf_counter()
        yield
        self.counts[EXCHANGE_BYTES] += self.exchange.bytes_sent - bytes_before
        self.seconds += time.perf_counter() - start

    @torch.no_grad()
    def adopt_reference(self) -> None:
        """Set the parameters to the reference after the outer step, plus the steps since the exchange started.

        Without such steps, the parameters of all workers equal the reference, to the bit. All workers call it.
        """
        local_steps = self.flatten() - self.sent
        vector_to_parameters(self.reference + local_steps, self.network.parameters())
        if self.momentum_of == "reset":
            self.optimizer.state.clear()
        elif self.momentum_of == "averaged":
            moments = self._find_moments()
            for moment, mean in zip(moments, self._average(moments), strict=True):
                moment.copy_(mean)

    def _find_moments(self) -> list[Tensor]:
        """Return the moments in the optimizer's state: tensors of a parameter's shape. All workers call it.

        A parameter without a gradient so far has no state. Zeros take its place, so that all workers have the same
        number of moments; its state stays empty. The workers gather the names of their moments: a worker without any
        gradient does not know them, and must not block the others. Raises UserError, on all workers, if none has
        any moments.

        Adam's first and second moments are averaged together: a mean first moment divided by the root of a worker's
        own second moment is a huge step if only this worker had no gradient.
        """
        trained = self._list_trained()
        local_names: dict[str, None] = {}  # an ordered set
        for parameter in trained:
            for name, value in self.optimizer.state.get(parameter, {}).items():
                if is_moment(value, parameter):
                    local_names[name] = None
        with self.count_traffic():
            gathered = self.world.all_gather(list(local_names))
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

    def _list_trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.network.parameters() if parameter.requires_grad]

    def _average(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the means of tensors over all workers. All workers call it."""
        vector = torch.cat([tensor.flatten() for tensor in tensors])
        with self.count_traffic():
            means = self.exchange.average(vector)
        parts = means.split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    # ---- between exchanges

    @torch.no_grad()
    def average_parameters(self) -> Tensor:
        """Return the mean of the parameters [n] over the workers, without changing them. All workers call it."""
        total = self.flatten()
        dist.all_reduce(total)
        return total.div_(self.world.size)

    @torch.no_grad()
    def build_average_network(self) -> nn.Module:
        """Return a copy of the network with the mean parameters of the workers, in eval mode. All workers call it."""
        vector_to_parameters(self.average_parameters(), self.average.parameters())
        for mean_buffer, buffer in zip(self.average.buffers(), self.network.buffers(), strict=True):
            mean_buffer.copy_(buffer)
        return self.average.eval()

    # ---- state

    @property
    def shared(self) -> dict[str, Tensor]:
        """Tensors that are the same on all workers, to be saved and loaded in place."""
        return {"reference": self.reference, "momentum": self.momentum, "counts": self.counts}

    def collect_vectors(self) -> dict[str, Any]:
        """Return the vectors of this worker alone, after waiting for an exchange in flight. All workers call it."""
        self.wait_for_exchange()
        vectors = {"parameters": self.flatten()}
        if self.awaits_outer_step:
            vectors |= {"sent": self.sent, "received": self.received}
        return vectors | self.exchange.collect()

    @torch.no_grad()
    def load_vectors(self, saved: dict[str, Any]) -> None:
        """Load vectors returned by `collect_vectors`."""
        vectors = {name: vector.to(self.reference.device) for name, vector in saved.items()}
        vector_to_parameters(vectors["parameters"], self.network.parameters())
        self.sent = vectors.get("sent", self.sent)
        self.received = vectors.get("received", self.received)
        self.exchange.load(vectors)


def is_moment(value: object, parameter: Tensor) -> TypeGuard[Tensor]:
    """Return whether a value of the optimizer's state is a tensor of the parameter's shape."""
    return isinstance(value, Tensor) and value.shape == parameter.shape
