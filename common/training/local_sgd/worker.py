"""A worker of local SGD: its own parameters, the reference of all workers, and the exchange between them.

All vectors [n] hold the n parameters of the network, in its order.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer

from common.core.errors import UserError
from common.distributed.rendezvous import World
from common.training.local_sgd.exchange import Exchange

EXCHANGES, BYTES, SENT_AFTER = range(3)  # in `counts`


class LocalWorker:
    """Parameters of this rank, which trains alone between two exchanges.

    `momentum_of` says what an exchange does to the momentum of the optimizer: it stays each worker's own, is averaged,
    or begins anew with the rest of the optimizer's state.
    """

    def __init__(
        self, network: nn.Module, optimizer: Optimizer, world: World, exchange: Exchange, momentum_of: str
    ) -> None:
        self.network, self.optimizer, self.world, self.momentum_of = network, optimizer, world, momentum_of
        self.exchange = exchange
        self.reference = self.flatten()
        """Parameters after the last outer step, the same on all workers."""
        self.sent = self.reference
        """This worker's parameters when the last exchange began."""
        self.received = self.reference
        """The result of the last exchange."""
        self.momentum = torch.zeros_like(self.reference)
        """Momentum of the outer steps, the same on all workers."""
        self.counts = torch.zeros(3, dtype=torch.int64)
        """Exchanges begun, bytes this worker has sent for them, and the step of the exchange whose outer step is not
        yet taken, 0 if there is none."""
        self.average = copy.deepcopy(network)
        self.seconds = 0.0
        """Seconds that this attempt waited in exchanges."""

    @property
    def sent_after(self) -> int:
        """The step after which the exchange began that `awaits_outer_step`; 0 if there is none."""
        return int(self.counts[SENT_AFTER])

    @property
    def awaits_outer_step(self) -> bool:
        """True while an exchange has begun whose outer step is not yet taken."""
        return self.sent_after > 0

    @torch.no_grad()
    def flatten(self) -> Tensor:
        """Return a copy of this worker's parameters [n]."""
        return parameters_to_vector(self.network.parameters())

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Replace the gradients by their means over all workers: the step that follows is that of DDP.

        A gradient that this worker does not have counts as zero: the vectors of all workers must be of one length.
        """
        trained = [p for p in self.network.parameters() if p.requires_grad]
        mean = self._average(parameters_to_vector([torch.zeros_like(p) if p.grad is None else p.grad for p in trained]))
        for parameter, values in zip(trained, mean.split([p.numel() for p in trained]), strict=True):
            parameter.grad = values.view_as(parameter)

    def set_reference(self) -> None:
        """Take the parameters, which are the same on all workers, as what later ones are compared with."""
        self.reference.copy_(self.flatten())

    # ---- an exchange

    @torch.no_grad()
    def begin_exchange(self, step: int) -> None:
        """Begin to send how far this worker's parameters are from the reference. All workers call it after a step."""
        with self.count_traffic():
            self.sent = self.flatten()
            self.exchange.begin(self.reference - self.sent)
        self.counts[EXCHANGES] += 1
        self.counts[SENT_AFTER] = step

    @torch.no_grad()
    def wait_for_exchange(self) -> None:
        """Wait for an exchange that is in flight, whose result is kept for the outer step. All workers call it."""
        if self.exchange.in_flight:
            with self.count_traffic():
                self.received = self.exchange.finish()

    def finish_exchange(self) -> Tensor:
        """Return the mean difference [n] over the workers; all of them call it, and then take the outer step."""
        self.wait_for_exchange()
        self.counts[SENT_AFTER] = 0
        return self.received

    @contextlib.contextmanager
    def count_traffic(self) -> Iterator[None]:
        """Count the bytes and seconds of the block as those of exchanges."""
        before, began = self.exchange.bytes_sent, time.perf_counter()
        yield
        self.counts[BYTES] += self.exchange.bytes_sent - before
        self.seconds += time.perf_counter() - began

    @torch.no_grad()
    def adopt_reference(self) -> None:
        """Go on from the reference after the outer step, with the steps since the exchange began. All workers call it.

        Where none was taken since, the parameters of all workers are the reference, to the bit.
        """
        vector_to_parameters(self.reference + (self.flatten() - self.sent), self.network.parameters())
        if self.momentum_of == "reset":
            self.optimizer.state.clear()
        elif self.momentum_of == "averaged":
            moments = self._find_moments()
            mean = self._average(torch.cat([m.flatten() for m in moments]))
            for moment, values in zip(moments, mean.split([m.numel() for m in moments]), strict=True):
                moment.copy_(values.view_as(moment))

    def _find_moments(self) -> list[Tensor]:
        """Return the tensors of the optimizer's state that are as large as a parameter. All workers call it.

        A parameter of which this worker has had no gradient has no state: zeros stand for it, so that the moments of
        all workers are as many, and it goes on without. Which kinds of moments there are the workers tell each other:
        one that has had no gradient at all does not know, and must not leave the others waiting. Raises UserError, on
        all workers, where none of them has any.
        Adam's first and second moments go together: a mean of first ones over the root of a worker's own second one is
        a huge step where this worker alone has had no gradient.
        """
        trained = [p for p in self.network.parameters() if p.requires_grad]
        states = [
            {name: value for name, value in self.optimizer.state.get(p, {}).items() if is_moment(value, p)}
            for p in trained
        ]
        with self.count_traffic():
            found = self.world.all_gather(list(dict.fromkeys(itertools.chain.from_iterable(states))))
        names = list(dict.fromkeys(itertools.chain.from_iterable(found)))
        if not names:
            kind = type(self.optimizer).__name__
            raise UserError(f"momentum_of=averaged: {kind} keeps no momentum in its state; use own")
        return [
            state[name] if name in state else torch.zeros_like(p)
            for p, state in zip(trained, states, strict=True)
            for name in names
        ]

    def _average(self, vector: Tensor) -> Tensor:
        with self.count_traffic():
            return self.exchange.average(vector)

    # ---- between exchanges

    @torch.no_grad()
    def average_parameters(self) -> Tensor:
        """Return the mean of the parameters [n] over the workers, which go on with their own. All of them call it."""
        total = self.flatten()
        dist.all_reduce(total)
        return total.div_(self.world.size)

    @torch.no_grad()
    def build_average_network(self) -> nn.Module:
        """Return a copy of the network with the mean of the parameters over the workers, in eval mode."""
        vector_to_parameters(self.average_parameters(), self.average.parameters())
        for buffer, own in zip(self.average.buffers(), self.network.buffers(), strict=True):
            buffer.copy_(own)
        return self.average.eval()

    # ---- state

    @property
    def shared(self) -> dict[str, Tensor]:
        """The tensors that are the same on all workers, to be saved and to be loaded into."""
        return {"reference": self.reference, "momentum": self.momentum, "counts": self.counts}

    def collect_own(self) -> dict[str, Any]:
        """Return the vectors of this worker alone. All workers call it; an exchange in flight is waited for."""
        self.wait_for_exchange()
        waiting = {"sent": self.sent, "received": self.received} if self.awaits_outer_step else {}
        return {"parameters": self.flatten()} | waiting | self.exchange.collect()

    @torch.no_grad()
    def load_own(self, saved: dict[str, Any]) -> None:
        """Load what `collect_own` returned."""
        own = {name: value.to(self.reference.device) for name, value in saved.items()}
        vector_to_parameters(own["parameters"], self.network.parameters())
        self.sent, self.received = own.get("sent", self.sent), own.get("received", self.received)
        self.exchange.load(own)


def is_moment(value: object, parameter: Tensor) -> bool:
    """Check for a tensor of the optimizer's state that has a number for each one of a parameter."""
    return isinstance(value, Tensor) and value.shape == parameter.shape
