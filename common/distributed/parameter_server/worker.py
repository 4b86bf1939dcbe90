"""Worker of a parameter server: it pulls parameters, and pushes the gradient it has computed, shard by shard.

Every rank is a worker, and the first ones are servers, too: a thread for each other worker answers its messages, so
that a slow cable keeps nobody else waiting. A worker reaches a server on its own rank without a message. Messages are
tensors, one tag for each kind: request (ticket and learning rate), values, gradient, answer (next ticket, staleness).

When a connection ends, gloo wakes whoever waits for a message of which nothing has come or gone yet, but nobody who
waits for the rest of one. So in an elastic run a large message has a small one behind it, and what is waited for first
is always small: that one, or the answer to a gradient, by which the gradient has gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import threading
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer

from common.distributed.parameter_server.server import MakeOptimizer, Policy, Server, Shard, split_vector
from common.distributed.rendezvous import World

REQUEST, VALUES, GRADIENT, ANSWER = 1, 2, 3, 4  # tags
BEHIND = 4  # added to the tag of a large message: that of the small one behind it
END = -1  # the ticket of the last request
IDLE = datetime.timedelta(days=365)  # evaluations and checkpoints come between two requests


class Worker:
    """This rank's part of a parameter server: its worker, and on the first ranks a server.

    A ticket names the next piece of work: ticket t is the share t % p of the batch of step t // p, of p workers. Server
    0 hands them out, in sync mode each worker's own share, else whichever is next. When ranks meet, no worker has
    started the next step, so every push has been applied. Workers may change in sync mode, between two calls of
    `stop_serving` and `start_serving`; the servers may not.
    """

    def __init__(
        self,
        network: nn.Module,
        world: World,
        make_optimizer: MakeOptimizer,
        *,
        servers: int,
        policy: Policy,
        damp: bool = False,
        record: bool = False,
    ) -> None:
        """Lay the parameters of `network` out as one vector. Raises UserError for more servers than parameters."""
        self.network, self.world, self.policy = network, world, policy
        self.parameters = list(network.parameters())
        self.flat = parameters_to_vector(self.parameters).detach()
        vector_to_parameters(self.flat, self.parameters)  # they are views of it from now on
        self.parts = split_vector(len(self.flat), servers)
        self.server: Server | None = None
        if world.number < servers:
            shard = Shard(self.flat[self.parts[world.rank]], make_optimizer, policy.workers)
            self.server = Server(shard, policy, world.timeout.total_seconds(), damp=damp, record=record)
        self.remote: list[int] = []
        """Servers that this rank reaches by messages; none until there is serving."""
        self.threads: list[threading.Thread] = []
        self.ticket = 0

    def start_serving(self, done: int) -> None:
        """Begin to serve the workers there are after so many steps; a rank that joins is alone and has none yet."""
        if self.world.joins:
            return
        rank, workers = self.world.rank, self.world.size
        if (rank < len(self.parts)) != (self.server is not None):
            raise RuntimeError(f"rank {rank} of {workers} has another rank's place: a server is lost")
        self.policy = dataclasses.replace(self.policy, workers=workers)
        self.ticket = done * workers + rank
        self.remote = [server for server in range(len(self.parts)) if server != rank]
        if self.server is not None:
            self.server.restart(done, workers)
            others = [worker for worker in range(workers) if worker != rank]
            self.threads = [threading.Thread(target=self._serve, args=(worker,), daemon=True) for worker in others]
        for thread in self.threads:
            thread.start()

    def take_shares(self, step: int, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the shares of a step's batch, inputs and targets, that this worker is to compute: any number.

        In sync mode the batch is this worker's own share already, else the whole one.
        """
        workers = self.policy.workers
        while self.ticket // workers == step - 1:
            share = self.ticket % workers
            yield (x, y) if self.policy.mode == "sync" else (x.chunk(workers)[share], y.chunk(workers)[share])

    def pull(self, rate: float) -> None:
        """Get the newest parameters from all servers; the push to come is to be applied at this learning rate."""
        request = torch.tensor([self.ticket, rate], dtype=torch.float64)
        servers = range(len(self.parts))
        # bounded servers keep pulls waiting: two workers that ask in different orders could wait for each other
        turns = [[rank] for rank in servers] if self.policy.mode == "bounded" else [list(servers)]
        for ranks in turns:
            remote = [rank for rank in ranks if rank in self.remote]
            coming = [self._receive_large(self.flat[self.parts[rank]], rank, VALUES) for rank in remote]
            asked = [self._send(request, rank, REQUEST) for rank in remote]
            if self.server is not None and self.world.rank in ranks:
                self.flat[self.parts[self.world.rank]] = self.server.pull(self.world.rank, self.ticket, rate)
            wait_for([*itertools.chain(*coming), *asked])

    def push(self) -> int:
        """Send the gradient, each server its shard of it, and wait for all answers; return the staleness.

        All servers have applied it then, or in sync mode have the pushes of all workers, for `take_prepared_step`.
        """
        gradient = parameters_to_vector(p.grad for p in self.parameters if p.grad is not None)
        answers = [torch.zeros(2, dtype=torch.int64) for _ in self.parts]
        coming = [self._receive(answers[rank], rank, ANSWER) for rank in self.remote]
        sent = [self._send_large(gradient[self.parts[rank]], rank, GRADIENT) for rank in self.remote]
        if self.server is not None:
            own = self.server.push(self.world.rank, gradient[self.parts[self.world.rank]])
            answers[self.world.rank] = torch.tensor(own)
        wait_for([*coming, *itertools.chain(*sent)])
        self.ticket = int(answers[0][0])
        return int(torch.stack(answers)[:, 1].max())

    def take_prepared_step(self) -> None:
        """Let this rank's server, if it has one, take the step whose pushes are all there."""
        if self.server is not None:
            self.server.take_prepared_step()

    def stop_serving(self, *, together: bool = True) -> None:
        """End the server's threads. Where not all ranks do so after the same step, their connections are cut."""
        if together:
            end = torch.tensor([END, 0.0], dtype=torch.float64)
            for rank in self.remote:
                with contextlib.suppress(RuntimeError):  # a connection that has ended ends its thread, too
                    self._send(end, rank, REQUEST).wait()
        elif self.server is not None:
            self.server.fail(RuntimeError("its connections are cut"))
        for thread in self.threads:
            thread.join()
        self.remote, self.threads = [], []

    # ---- all ranks together, between steps

    def fetch_parameters(self) -> None:
        """Let every rank's network have the newest parameters. All ranks call it."""
        self._all_gather_shards(self.flat, self.server.shard.values.detach() if self.server else None)

    def fetch_optimizer_state(self, optimizer: Optimizer) -> None:
        """Put the servers' optimizer state, by parameter, into an optimizer of the network. All ranks call it."""
        own = self.server.shard.optimizer.state[self.server.shard.values] if self.server else {}
        for key, is_vector in self.world.broadcast([[key, value.dim() > 0] for key, value in own.items()]):
            whole = torch.zeros_like(self.flat) if is_vector else torch.zeros(())
            if is_vector:
                self._all_gather_shards(whole, own.get(key))
            else:  # the number of steps, the same everywhere between steps
                whole.copy_(own.get(key, whole))
                dist.broadcast(whole, 0)
            pieces = whole.split([p.numel() for p in self.parameters]) if is_vector else itertools.repeat(whole)
            for parameter, piece in zip(self.parameters, pieces, strict=False):
                optimizer.state[parameter][key] = piece.view_as(parameter) if is_vector else piece.clone()

    def load_server_from(self, optimizer: Optimizer) -> None:
        """Load this rank's server with its shard of the network's parameters and of an optimizer's state."""
        if self.server is None:
            return
        shard, part = self.server.shard, self.parts[self.world.rank]
        with torch.no_grad():
            shard.values.copy_(self.flat[part])
        states = [optimizer.state[parameter] for parameter in self.parameters]
        for key, first in states[0].items():
            whole = torch.cat([state[key].flatten() for state in states])[part] if first.dim() else first
            shard.optimizer.state[shard.values][key] = whole.clone()

    def _all_gather_shards(self, whole: Tensor, own: Tensor | None) -> None:
        """Fill `whole` [n] on all ranks with the servers' shards; `own` is this rank's, None without a server."""
        whole.zero_()
        if own is not None:
            whole[self.parts[self.world.rank]] = own
        # no broadcasts: gloo wakes no rank that waits for the rest of one when the connection ends. As whole numbers,
        # to which zeros are added, all stays as it is to the bit
        dist.all_reduce(whole.view(torch.int32))

    # ---- messages

    def _serve(self, worker: int) -> None:
        """Answer one worker until its end, in a thread of its own."""
        assert self.server is not None
        request = torch.zeros(2, dtype=torch.float64)
        try:
            while True:
                self._receive(request, worker, REQUEST).wait(IDLE)
                ticket, rate = request.tolist()
                if ticket == END:
                    return
                gradient = torch.empty_like(self.server.shard.values.detach())
                coming = self._receive_large(gradient, worker, GRADIENT)
                sent = self._send_large(self.server.pull(worker, int(ticket), rate), worker, VALUES)
                wait_for(coming + sent, IDLE)
                self._send(torch.tensor(self.server.push(worker, gradient)), worker, ANSWER).wait()
        except (RuntimeError, TimeoutError) as error:
            self.server.fail(error)

    def _send_large(self, value: Tensor, rank: int, tag: int) -> list[dist.Work]:
        sent = [self._send(value, rank, tag)]
        return [*sent, self._send(torch.zeros(1), rank, tag + BEHIND)] if self.world.coordinator else sent

    def _receive_large(self, value: Tensor, rank: int, tag: int) -> list[dist.Work]:
        """Receive a large message; what this returns is waited for in this order."""
        coming = [self._receive(value, rank, tag)]
        return [self._receive(torch.zeros(1), rank, tag + BEHIND), *coming] if self.world.coordinator else coming

    def _send(self, value: Tensor, rank: int, tag: int) -> dist.Work:
        work = dist.isend(value, self.world.global_rank(rank), self.world.group, tag)
        assert work is not None
        return work

    def _receive(self, value: Tensor, rank: int, tag: int) -> dist.Work:
        work = dist.irecv(value, self.world.global_rank(rank), self.world.group, tag)
        assert work is not None
        return work


def wait_for(works: Sequence[dist.Work], timeout: datetime.timedelta | None = None) -> None:
    """Wait until messages are sent or received, for each at most so long, else as long as the group allows."""
    for work in works:
        if timeout is None:
            work.wait()
        else:
            work.wait(timeout)
