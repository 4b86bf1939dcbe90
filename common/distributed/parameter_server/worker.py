"""Worker of a parameter server: pulls parameters and pushes the computed gradient, shard by shard.

Every rank is a worker; the first ranks are servers, too. A server has one thread per remote worker, so that a slow
connection does not delay other workers. A worker accesses a server on its own rank without messages. Messages are
tensors with one tag per kind: request (ticket and learning rate), values, gradient, answer (next ticket, staleness).

When a connection ends, gloo wakes ranks that wait for a message of which no byte has been transferred, but not ranks
that wait for the remainder of a message. Therefore, in an elastic run, a small message follows each large one, and
ranks always wait for a small message first: for that one, or for the answer to a gradient, which implies that the
gradient has been sent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import threading
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer

from common.distributed.parameter_server.server import MakeOptimizer, Shard, ShardServer, StalenessPolicy, split_vector
from common.distributed.rendezvous import World

# Tags of messages.
REQUEST = 1
VALUES = 2
GRADIENT = 3
ANSWER = 4
FOLLOWER_OFFSET = 4  # added to the tag of a large message: tag of the small message that follows it

END_TICKET = -1  # in the last request of a worker
IDLE_TIMEOUT = datetime.timedelta(days=365)  # evaluations and checkpoints may come between two requests


class ServerWorker:
    """This rank's part of a parameter server: its worker, and on the first ranks a server.

    A ticket identifies a share of the work: with p workers, ticket t is share t % p of the batch of step t // p. Server
    0 assigns tickets: in sync mode each worker's own share, otherwise the next free one. Between steps, when all ranks
    synchronize, no worker has started the next step, so every push has been applied. In sync mode the workers may
    change between `stop_serving` and `start_serving`; the servers may not.
    """

    def __init__(
        self,
        network: nn.Module,
        world: World,
        make_optimizer: MakeOptimizer,
        *,
        servers: int,
        policy: StalenessPolicy,
        damp: bool = False,
        record: bool = False,
    ) -> None:
        """Flatten the parameters of `network` into one vector. Raises UserError for more servers than parameters."""
        self.network = network
        self.world = world
        self.policy = policy
        self.parameters = list(network.parameters())
        self.flat = parameters_to_vector(self.parameters).detach()
        vector_to_parameters(self.flat, self.parameters)  # parameters become views of the vector
        self.parts = split_vector(len(self.flat), servers)
        self.server: ShardServer | None = None
        if world.original_rank < servers:
            shard = Shard(self.flat[self.parts[world.rank]], make_optimizer, policy.workers)
            self.server = ShardServer(shard, policy, world.timeout.total_seconds(), damp=damp, record=record)
        self.remote_servers: list[int] = []
        """Servers that this rank reaches by messages; empty while not serving."""
        self.threads: list[threading.Thread] = []
        self.ticket = 0

    def start_serving(self, done: int) -> None:
        """Start to serve all workers after `done` steps; a rank that has not joined yet does nothing."""
        if self.world.is_joining:
            return
        rank = self.world.rank
        workers = self.world.size
        if (rank < len(self.parts)) != (self.server is not None):
            raise RuntimeError(f"rank {rank} of {workers} has the position of another rank: a server is lost")
        self.policy = dataclasses.replace(self.policy, workers=workers)
        self.ticket = done * workers + rank
        self.remote_servers = [server for server in range(len(self.parts)) if server != rank]
        if self.server is None:
            return
        self.server.restart(done, workers)
        remote_workers = [worker for worker in range(workers) if worker != rank]
        self.threads = [threading.Thread(target=self._serve_worker, args=(i,), daemon=True) for i in remote_workers]
        for thread in self.threads:
            thread.start()

    def take_shares(self, step: int, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the shares of a step's batch (inputs, targets) that this worker computes: any number of them.

        In sync mode the batch already is this worker's share, otherwise the full batch.
        """
        workers = self.policy.workers
        while self.ticket // workers == step - 1:
            share = self.ticket % workers
            if self.policy.mode == "sync":
                yield x, y
            else:
                yield x.chunk(workers)[share], y.chunk(workers)[share]

    def pull(self, rate: float) -> None:
        """Get the newest parameters from all servers; the next push is applied at this learning rate."""
        rank = self.world.rank
        request = torch.tensor([self.ticket, rate], dtype=torch.float64)
        groups = [list(range(len(self.parts)))]
        if self.policy.mode == "bounded":
            # They delay pulls: two workers that asked them in different orders could block each other.
            groups = [[server] for server in groups[0]]
        for group in groups:
            remote = [server for server in group if server in self.remote_servers]
            works: list[dist.Work] = []
            for server in remote:
                works += self._receive_large(self.flat[self.parts[server]], server, VALUES)
            works += [self._send(request, server, REQUEST) for server in remote]
            if self.server is not None and rank in group:
                self.flat[self.parts[rank]] = self.server.pull(rank, self.ticket, rate)
            wait_for_works(works)

    def push(self) -> int:
        """Send each server its shard of the gradient and wait for all answers; return the staleness.

        Afterwards all servers have applied the gradient. In sync mode they have the pushes of all workers and wait for
        `take_prepared_step`.
        """
        gradient = parameters_to_vector(p.grad for p in self.parameters if p.grad is not None)
        answers = [torch.zeros(2, dtype=torch.int64) for _ in self.parts]
        works = [self._receive(answers[server], server, ANSWER) for server in self.remote_servers]
        for server in self.remote_servers:
            works += self._send_large(gradient[self.parts[server]], server, GRADIENT)
        if self.server is not None:
            rank = self.world.rank
            answer = self.server.push(rank, gradient[self.parts[rank]])
            answers[rank] = torch.tensor(answer)
        wait_for_works(works)
        self.ticket = int(answers[0][0])
        return int(torch.stack(answers)[:, 1].max())

    def take_prepared_step(self) -> None:
        """Let this rank's server, if any, take the step whose pushes have all arrived."""
        if self.server is not None:
            self.server.take_prepared_step()

    def stop_serving(self, *, together: bool = True) -> None:
        """Stop the server's threads. If the ranks do not stop after the same step, the connections are cut."""
        if together:
            end_request = torch.tensor([END_TICKET, 0.0], dtype=torch.float64)
            for server in self.remote_servers:
                with contextlib.suppress(RuntimeError):  # a closed connection ends the thread, too
                    self._send(end_request, server, REQUEST).wait()
        elif self.server is not None:
            self.server.fail(RuntimeError("its connections are cut"))
        for thread in self.threads:
            thread.join()
        self.remote_servers = []
        self.threads = []

    # ---- all ranks together, between steps

    def fetch_parameters(self) -> None:
        """Copy the newest parameters into the network of every rank. All ranks call it."""
        shard = self.server.shard.values.detach() if self.server else None
        self._all_gather_shards(self.flat, shard)

    def fetch_optimizer_state(self, optimizer: Optimizer) -> None:
        """Copy the servers' optimizer state, by parameter, into an optimizer of the network. All ranks call it."""
        local_state = self.server.shard.optimizer.state[self.server.shard.values] if self.server else {}
        entries = [[key, value.dim() > 0] for key, value in local_state.items()]
        for key, is_vector in self.world.broadcast(entries):
            if is_vector:
                vector = torch.zeros_like(self.flat)
                self._all_gather_shards(vector, local_state.get(key))
                pieces = vector.split([p.numel() for p in self.parameters])
                for parameter, piece in zip(self.parameters, pieces, strict=True):
                    optimizer.state[parameter][key] = piece.view_as(parameter)
            else:  # the number of steps, equal on all servers between steps
                scalar = torch.zeros(())
                if key in local_state:
                    scalar.copy_(local_state[key])
                dist.broadcast(scalar, 0)
                for parameter in self.parameters:
                    optimizer.state[parameter][key] = scalar.clone()

    def load_server_from(self, optimizer: Optimizer) -> None:
        """Load this rank's shard from the network's parameters and from an optimizer's state."""
        if self.server is None:
            return
        shard = self.server.shard
        part = self.parts[self.world.rank]
        with torch.no_grad():
            shard.values.copy_(self.flat[part])
        states = [optimizer.state[parameter] for parameter in self.parameters]
        for key, first in states[0].items():
            entry = first
            if first.dim():
                entry = torch.cat([state[key].flatten() for state in states])[part]
            shard.optimizer.state[shard.values][key] = entry.clone()

    def _all_gather_shards(self, vector: Tensor, shard: Tensor | None) -> None:
        """Fill `vector` [n] on all ranks with the servers' shards; `shard` is this rank's, None without a server."""
        vector.zero_()
        if shard is not None:
            vector[self.parts[self.world.rank]] = shard
        # Not dist.broadcast: gloo does not wake a rank that waits for its remainder when the connection ends. The sum
        # of integers and zeros keeps all bits.
        dist.all_reduce(vector.view(torch.int32))

    # ---- messages

    def _serve_worker(self, worker: int) -> None:
        """Answer one worker until its last request; runs in its own thread."""
        assert self.server is not None
        request = torch.zeros(2, dtype=torch.float64)
        try:
            while True:
                self._receive(request, worker, REQUEST).wait(IDLE_TIMEOUT)
                ticket, rate = request.tolist()
                if ticket == END_TICKET:
                    return
                gradient = torch.empty_like(self.server.shard.values.detach())
                works = self._receive_large(gradient, worker, GRADIENT)
                values = self.server.pull(worker, int(ticket), rate)
                works += self._send_large(values, worker, VALUES)
                wait_for_works(works, IDLE_TIMEOUT)
                answer = torch.tensor(self.server.push(worker, gradient))
                self._send(answer, worker, ANSWER).wait()
        except (RuntimeError, TimeoutError) as error:
            self.server.fail(error)

    def _send_large(self, value: Tensor, rank: int, tag: int) -> list[dist.Work]:
        works = [self._send(value, rank, tag)]
        if self.world.coordinator:
            works.append(self._send(torch.zeros(1), rank, tag + FOLLOWER_OFFSET))
        return works

    def _receive_large(self, value: Tensor, rank: int, tag: int) -> list[dist.Work]:
        """Receive a large message; the caller must wait for the returned works in this order."""
        works = [self._receive(value, rank, tag)]
        if self.world.coordinator:
            works.insert(0, self._receive(torch.zeros(1), rank, tag + FOLLOWER_OFFSET))
        return works

    def _send(self, value: Tensor, rank: int, tag: int) -> dist.Work:
        work = dist.isend(value, self.world.get_global_rank(rank), self.world.group, tag)
        assert work is not None
        return work

    def _receive(self, value: Tensor, rank: int, tag: int) -> dist.Work:
        work = dist.irecv(value, self.world.get_global_rank(rank), self.world.group, tag)
        assert work is not None
        return work


def wait_for_works(works: Sequence[dist.Work], timeout: datetime.timedelta | None = None) -> None:
    """Wait for all messages, each at most `timeout`, by default the timeout of the group."""
    for work in works:
        if timeout is None:
            work.wait()
        else:
            work.wait(timeout)
