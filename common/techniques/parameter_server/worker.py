"""Worker of a parameter server, which pulls parameters and pushes the computed gradient, shard by shard.

Every rank is a worker, and the first ranks are also servers. A server has one thread per remote worker, so that a slow
connection does not delay other workers. A worker and a server on the same rank communicate without messages. Messages
are tensors, and each kind of message has its own tag. The kinds are request (ticket and learning rate), values,
gradient, and answer (next ticket and staleness).

When a connection ends, gloo wakes a rank that waits for a message of which no byte has been transferred. However, gloo
does not wake a rank that waits for the remainder of a message. In an elastic run, each large message is therefore
followed by a small message, and a rank always waits for a small message first. A rank that sends a gradient waits for
the answer first, because the answer implies that the gradient has been sent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer

from common.models.sample_dropout import list_dropout_layers
from common.ranks.ranks import Ranks
from common.system.errors import RankTimeoutError, UserError
from common.techniques.parameter_server.server import (
    MakeOptimizer,
    Shard,
    ShardServer,
    StalenessPolicy,
    split_vector_into_shards,
)

# Tags of messages
REQUEST = 1
VALUES = 2
GRADIENT = 3
ANSWER = 4
FOLLOWER_OFFSET = 4  # a small message has the tag of the large message that it follows, plus this number

END_TICKET = -1  # a worker's last request has this ticket
IDLE_TIMEOUT = datetime.timedelta(days=365)  # an evaluation or a checkpoint may take place between two requests


class ParameterServerRank:
    """This rank's part of a parameter server: a worker and, on the first ranks, also a server.

    A ticket identifies a share of the work. With p workers, ticket t is share t % p of the batch of step t // p. Server
    0 assigns the tickets. In sync mode, each worker gets the same share of every batch. Otherwise, each worker gets the
    next free ticket. If all ranks synchronize between two steps, no worker has started the second step, so all pushes
    of the first step have been applied. In sync mode, the set of workers may change between `stop_serving` and
    `start_serving`, but the set of servers may not.
    """

    def __init__(
        self,
        network: nn.Module,
        ranks: Ranks,
        make_optimizer: MakeOptimizer,
        *,
        servers: int,
        policy: StalenessPolicy,
        damp: bool = False,
        record: bool = False,
    ) -> None:
        """Flatten the parameters of `network` into one vector.

        Raises UserError if there are more servers than parameters, or if a parameter is frozen.
        """
        for name, parameter in network.named_parameters():
            if not parameter.requires_grad:
                problem = f"the parameter {name} is frozen (requires_grad=False), so a server cannot update it"
                raise UserError(f"{problem}; register it as a buffer, or do not freeze it")
        self.network = network
        self.ranks = ranks
        world = ranks.current
        self.policy = policy
        self.parameters = list(network.parameters())
        self.flat = parameters_to_vector(self.parameters).detach()
        vector_to_parameters(self.flat, self.parameters)  # the parameters become views of the vector
        self.parts = split_vector_into_shards(len(self.flat), servers)
        self.server: ShardServer | None = None
        if world.original_rank < servers:
            shard = Shard(self.flat[self.parts[world.rank]], make_optimizer, policy.workers)
            self.server = ShardServer(shard, policy, world.timeout.total_seconds(), damp=damp, record=record)
        self.remote_servers: list[int] = []
        """Ranks of the servers to which this rank sends messages; empty while serving is stopped."""
        self.threads: list[threading.Thread] = []
        self.ticket = 0
        self.clip_factor = 1.0
        """Number by which the gradient of the prepared step is multiplied."""
        self.dropout_layers = list_dropout_layers([network])
        self.before_push: Callable[[], None] | None = None

    def call_before_push(self, function: Callable[[], None]) -> None:
        """Call a function before each push, when the parameters of the network have their gradients."""
        self.before_push = function

    def start_serving(self, done: int) -> None:
        """Start serving all workers after `done` completed steps.

        The call has no effect on a rank that has not joined the run yet.
        """
        world = self.ranks.current
        if world.is_joining:
            return
        rank = world.rank
        workers = world.size
        if (rank < len(self.parts)) != (self.server is not None):
            raise RuntimeError(
                f"a server was lost: the ranks were renumbered, and rank {rank} of {workers} no longer fits its shard"
            )
        self.policy = dataclasses.replace(self.policy, workers=workers)
        self.ticket = done * workers + rank
        self.remote_servers = [server for server in range(len(self.parts)) if server != rank]
        if self.server is None:
            return
        self.server.restart_serving(done, workers)
        remote_workers = [worker for worker in range(workers) if worker != rank]
        self.threads = [threading.Thread(target=self._serve_worker, args=(i,), daemon=True) for i in remote_workers]
        for thread in self.threads:
            thread.start()

    def iterate_batch_shares(self, step: int, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, as pairs (inputs, targets), the shares of a step's batch that are assigned to this worker.

        There may be any number of shares, including none. In sync mode, `x` and `y` are already this worker's share;
        otherwise, `x` and `y` are the full batch.
        """
        workers = self.policy.workers
        while self.ticket // workers == step - 1:
            share = self.ticket % workers
            if self.policy.mode == "sync":
                yield x, y
            else:
                for layer in self.dropout_layers:
                    layer.select_share(share, workers)
                yield x.chunk(workers)[share], y.chunk(workers)[share]

    def pull(self, rate: float) -> None:
        """Get the newest parameters from all servers.

        The next push is applied with the learning rate `rate`.
        """
        rank = self.ranks.current.rank
        request = torch.tensor([self.ticket, rate], dtype=torch.float64)
        groups = [list(range(len(self.parts)))]
        if self.policy.mode == "bounded":
            # Ask one server after the other. In bounded mode, servers delay pulls, so two workers that ask the servers
            # in different orders could block each other.
            groups = [[server] for server in groups[0]]
        for group in groups:
            remote = [server for server in group if server in self.remote_servers]
            works: list[dist.Work] = []
            for server in remote:
                works += self._receive_large_message(self.flat[self.parts[server]], server, VALUES)
            works += [self._send(request, server, REQUEST) for server in remote]
            if self.server is not None and rank in group:
                self.flat[self.parts[rank]] = self.server.pull(rank, self.ticket, rate)
            wait_for_messages(works)

    def push(self) -> int:
        """Send the gradient to all servers, wait for their answers and return the maximum staleness.

        Each server gets its shard of the gradient. When this call returns, all servers have applied the gradient. In
        sync mode, the servers have only received the pushes of all workers, and `apply_prepared_step` applies these
        pushes.
        """
        if self.before_push is not None:
            self.before_push()
        gradient = parameters_to_vector(p.grad for p in self.parameters if p.grad is not None)
        answers = [torch.zeros(2, dtype=torch.int64) for _ in self.parts]
        works = [self._receive(answers[server], server, ANSWER) for server in self.remote_servers]
        for server in self.remote_servers:
            works += self._send_large_message(gradient[self.parts[server]], server, GRADIENT)
        if self.server is not None:
            rank = self.ranks.current.rank
            answer = self.server.push(rank, gradient[self.parts[rank]])
            answers[rank] = torch.tensor(answer)
        wait_for_messages(works)
        self.ticket = int(answers[0][0])
        return int(torch.stack(answers)[:, 1].max())

    def clip_prepared_step(self, max_norm: float) -> Tensor:
        """Clip the gradient of the prepared step, and return its norm over the shards of all servers, a 0-d tensor.

        All ranks must call this method after `push` in sync mode, and before `apply_prepared_step`.
        """
        squared_norm = torch.zeros((), dtype=torch.float64)
        if self.server is not None:
            squared_norm += self.server.compute_squared_norm()
        dist.all_reduce(squared_norm)
        norm = squared_norm.sqrt()
        self.clip_factor = min(1.0, max_norm / (norm.item() + 1e-6))  # as in torch.nn.utils
        return norm

    def apply_prepared_step(self) -> None:
        """Apply the prepared step on this rank's server, if this rank has a server."""
        if self.server is not None:
            self.server.apply_prepared_step(self.clip_factor)
        self.clip_factor = 1.0

    def stop_serving(self, *, together: bool = True) -> None:
        """Stop the threads of this rank's server.

        If `together` is true, all ranks must stop after the same step. If `together` is false, the caller must first
        close the connections, and all waiting calls of the server fail.
        """
        if together:
            end_request = torch.tensor([END_TICKET, 0.0], dtype=torch.float64)
            for server in self.remote_servers:
                with contextlib.suppress(RuntimeError):  # a closed connection also ends the server's thread
                    self._send(end_request, server, REQUEST).wait()
        elif self.server is not None:
            self.server.abort_waiting_calls(RuntimeError("the connections between the ranks have been closed"))
        for thread in self.threads:
            thread.join()
        self.remote_servers = []
        self.threads = []

    # ---- collective operations between steps

    def fetch_parameters(self) -> None:
        """Copy the newest parameters into the network of every rank. All ranks must call this method."""
        shard = self.server.shard.values.detach() if self.server else None
        self._all_gather_shards(self.flat, shard)

    def fetch_optimizer_state(self, optimizer: Optimizer) -> None:
        """Copy the optimizer state of all servers into an optimizer of the network.

        The state of each shard is split into tensors that match the parameters of the network. All ranks must call this
        method.
        """
        local_state = self.server.shard.optimizer.state[self.server.shard.values] if self.server else {}
        entries = [[key, value.dim() > 0] for key, value in local_state.items()]
        for key, is_vector in self.ranks.current.broadcast(entries):
            if is_vector:
                vector = torch.zeros_like(self.flat)
                self._all_gather_shards(vector, local_state.get(key))
                pieces = vector.split([p.numel() for p in self.parameters])
                for parameter, piece in zip(self.parameters, pieces, strict=True):
                    optimizer.state[parameter][key] = piece.view_as(parameter)
            else:  # the number of steps, which is equal on all servers between steps
                scalar = torch.zeros(())
                if key in local_state:
                    scalar.copy_(local_state[key])
                dist.broadcast(scalar, 0)
                for parameter in self.parameters:
                    optimizer.state[parameter][key] = scalar.clone()

    def load_server_shard(self, optimizer: Optimizer) -> None:
        """Load this rank's shard, if any, from the parameters of the network and the state of `optimizer`."""
        if self.server is None:
            return
        shard = self.server.shard
        part = self.parts[self.ranks.current.rank]
        with torch.no_grad():
            shard.values.copy_(self.flat[part])
        states = [optimizer.state[parameter] for parameter in self.parameters]
        for key, first in states[0].items():
            entry = first
            if first.dim():
                entry = torch.cat([state[key].flatten() for state in states])[part]
            shard.optimizer.state[shard.values][key] = entry.clone()

    def _all_gather_shards(self, vector: Tensor, shard: Tensor | None) -> None:
        """Fill `vector` [n] on all ranks with the shards of all servers.

        `shard` is the shard of this rank's server, or None if this rank has no server.
        """
        vector.zero_()
        if shard is not None:
            vector[self.parts[self.ranks.current.rank]] = shard
        # dist.broadcast is not suitable: when the connection ends, gloo does not wake a rank that waits for the
        # remainder of a broadcast. The sum of an integer and zeros preserves all bits.
        dist.all_reduce(vector.view(torch.int32))

    # ---- messages

    def _serve_worker(self, worker: int) -> None:
        """Answer all requests of one worker. This method runs in a separate thread."""
        assert self.server is not None
        request = torch.zeros(2, dtype=torch.float64)
        try:
            while True:
                self._receive(request, worker, REQUEST).wait(IDLE_TIMEOUT)
                ticket, rate = request.tolist()
                if ticket == END_TICKET:
                    return
                gradient = torch.empty_like(self.server.shard.values.detach())
                works = self._receive_large_message(gradient, worker, GRADIENT)
                values = self.server.pull(worker, int(ticket), rate)
                works += self._send_large_message(values, worker, VALUES)
                wait_for_messages(works, IDLE_TIMEOUT)
                answer = torch.tensor(self.server.push(worker, gradient))
                self._send(answer, worker, ANSWER).wait()
        except (RuntimeError, RankTimeoutError) as error:
            self.server.abort_waiting_calls(error)

    def _send_large_message(self, value: Tensor, rank: int, tag: int) -> list[dist.Work]:
        works = [self._send(value, rank, tag)]
        if self.ranks.current.coordinator:
            works.append(self._send(torch.zeros(1), rank, tag + FOLLOWER_OFFSET))
        return works

    def _receive_large_message(self, value: Tensor, rank: int, tag: int) -> list[dist.Work]:
        """Start receiving a large message. The caller must wait for the returned works in the order of the list."""
        works = [self._receive(value, rank, tag)]
        if self.ranks.current.coordinator:
            works.insert(0, self._receive(torch.zeros(1), rank, tag + FOLLOWER_OFFSET))
        return works

    def _send(self, value: Tensor, rank: int, tag: int) -> dist.Work:
        world = self.ranks.current
        work = dist.isend(value, world.get_global_rank(rank), world.group, tag)
        assert work is not None
        return work

    def _receive(self, value: Tensor, rank: int, tag: int) -> dist.Work:
        world = self.ranks.current
        work = dist.irecv(value, world.get_global_rank(rank), world.group, tag)
        assert work is not None
        return work


def wait_for_messages(works: Sequence[dist.Work], timeout: datetime.timedelta | None = None) -> None:
    """Wait for all messages, for at most `timeout` each.

    By default, each wait has the timeout of the process group.
    """
    for work in works:
        if timeout is None:
            work.wait()
        else:
            work.wait(timeout)
