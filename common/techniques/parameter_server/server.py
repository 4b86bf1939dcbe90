"""Servers of a parameter server, each of which stores and updates a shard of the parameters.

Parameter servers are described by Li et al. 2014 (OSDI). A worker pulls (requests) parameters, computes a gradient, and
pushes (sends) the gradient to the servers. A server answers a pull with its shard and applies a pushed gradient with a
torch optimizer. Each optimizer step creates a new version of the shard. The staleness of a push is the number of
versions that were created after the worker pulled the parameters and before its gradient was applied.

In sync mode, each step has two phases. When the pushes of all workers have arrived, the server prepares the step and
answers the pushes. `apply_prepared_step` then applies the step. A worker that has received the answers of all servers
therefore knows that every server has received all pushes. In an elastic run, a step that one rank has completed can
therefore be applied on every server. A step that no rank has completed is not applied on any server.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from common.system.causes import Cause
from common.system.errors import CausedRuntimeError, RankTimeoutError, UserError
from common.system.text import format_count

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def split_vector_into_shards(length: int, servers: int) -> list[slice]:
    """Return slices that divide a vector into shards of nearly equal length. Raises UserError if one is empty."""
    if servers > length:
        raise UserError(f"servers={servers}: the model has only {format_count(length, 'parameter')}; use fewer servers")
    return [slice(length * i // servers, length * (i + 1) // servers) for i in range(servers)]


class Shard:
    """A consecutive part [n] of the flat parameter vector, with its own optimizer."""

    def __init__(self, values: Tensor, make_optimizer: MakeOptimizer, workers: int) -> None:
        self.values = nn.Parameter(values.detach().clone())
        self.optimizer = make_optimizer([self.values])
        self.workers = workers
        self.version = 0
        """Number of optimizer steps taken."""

    def average_gradients(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the mean [n] of pushed gradients [n]."""
        return functools.reduce(torch.add, gradients) / len(gradients)

    def apply_gradients(self, gradients: Sequence[Tensor], rate: float, factor: float = 1.0) -> None:
        """Take one optimizer step with pushed gradients [n].

        The mean gradient is multiplied by `factor`. The learning rate `rate` belongs to a step with the whole batch. It
        is multiplied by the part of the batch from which the gradients were computed. Otherwise, weight decay and Adam,
        which do not depend on the scale of the gradient, would change the parameters too much.
        """
        self.values.grad = self.average_gradients(gradients) * factor
        self.optimizer.param_groups[0]["lr"] = rate * (len(gradients) / self.workers)
        self.optimizer.step()
        self.version += 1


@dataclass(frozen=True)
class StalenessPolicy:
    """Rules that decide when a pull is answered and when a push is applied.

    In sync mode, the server waits for the pushes of all workers and applies these pushes together. In async mode, the
    server applies each push immediately. Bounded mode is the stale synchronous parallel model (Ho et al. 2013), except
    that staleness is counted in versions. In bounded mode, the server answers a pull or applies a push only if every
    outstanding push can still be applied with a staleness of at most `max_staleness`.
    """

    mode: Literal["sync", "async", "bounded"]
    max_staleness: int
    workers: int

    def admits_pull(self, pulled: Collection[int], version: int) -> bool:
        """Return whether a pull may be answered now.

        `pulled` contains the versions from which the other workers are computing gradients. `version` is the current
        version.
        """
        return self.mode != "bounded" or self._stays_within_limit([*pulled, version], version)

    def choose_pushes(self, waiting: Collection[int], pulled: Mapping[int, int], version: int) -> list[int]:
        """Return the workers whose pushes can now be applied together; the list is empty if all pushes must wait.

        `waiting` contains the workers whose pushes are waiting, in order of arrival. `pulled` contains the version that
        each worker has pulled, if its push has not been applied yet. `version` is the current version.
        """
        if self.mode == "sync":
            return sorted(waiting) if len(waiting) == self.workers else []
        for worker in waiting:
            other_versions = [pulled_version for other, pulled_version in pulled.items() if other != worker]
            if self.mode == "async" or self._stays_within_limit(other_versions, version + 1):
                return [worker]
        return []

    def _stays_within_limit(self, pulled: Iterable[int], version: int) -> bool:
        """Return whether the staleness of all outstanding pushes can stay within the limit.

        The pushes are applied one after the other, starting at `version`, with the oldest pulled version first.
        """
        return all(
            version + i - pulled_version <= self.max_staleness for i, pulled_version in enumerate(sorted(pulled))
        )


class ShardServer:
    """Server of one shard, which all workers may use concurrently.

    Each worker alternates between `pull` and `push`. Both methods block as long as the policy requires. Both methods
    raise RankTimeoutError after `timeout` seconds, and RuntimeError after a call of `abort_waiting_calls`. Pulls are
    answered in order of arrival, so no pull waits forever.
    """

    def __init__(
        self, shard: Shard, policy: StalenessPolicy, timeout: float, *, damp: bool = False, record: bool = False
    ) -> None:
        """Create a server with no waiting requests.

        If `damp` is true, the learning rate of a push is divided by its staleness (arXiv 1511.05950). If `record` is
        true, all pulls and steps are recorded in `events`.
        """
        self.shard = shard
        self.policy = policy
        self.timeout = timeout
        self.damp = damp
        self.records_events = record
        self.changed = threading.Condition()
        self.pull_queue: deque[int] = deque()
        """Workers whose pulls are waiting, in order of arrival."""
        self.pulled: dict[int, int] = {}
        """Version that each worker has pulled, for workers whose push has not been applied yet."""
        self.tickets: dict[int, tuple[int, float]] = {}
        """Ticket (number of a share of the work) and learning rate of each worker whose push has not been applied
        yet."""
        self.waiting_pushes: dict[int, Tensor] = {}
        self.answers: dict[int, tuple[int, int]] = {}
        self.failure: BaseException | None = None
        self.prepared: Callable[[float], None] | None = None
        """In sync mode, a function that applies the prepared step; None if no step is prepared. Its argument multiplies
        the gradient."""
        self.prepared_gradients: Sequence[Tensor] = ()
        """Gradients [n] of the prepared step."""
        self.next_ticket = 0
        self.pulls = 0
        """Number of answered pulls."""
        self.staleness: Counter[int] = Counter()
        """Number of applied pushes by staleness."""
        self.events: list[dict[str, Any]] = []
        """Recorded pulls and steps, in order of execution.

        A pull is recorded as {"pull": ticket, "version": n} with the pulled version. A step is recorded as {"push":
        [tickets], "rate": x, "version": n} with the version that the step created. If the gradient was clipped,
        "factor" is the number by which it was multiplied.
        """

    def restart_serving(self, done: int, workers: int) -> None:
        """Start serving `workers` workers after `done` completed steps.

        Pending requests, and pushes that belong to a failed step, are discarded.
        """
        self.policy = dataclasses.replace(self.policy, workers=workers)
        self.shard.workers = workers
        self.next_ticket = (done + 1) * workers
        self.failure = None
        self.prepared = None
        for pending in (self.pull_queue, self.pulled, self.tickets, self.waiting_pushes, self.answers):
            pending.clear()

    def pull(self, worker: int, ticket: int, rate: float) -> Tensor:
        """Return the shard's values [n], from which the worker computes the gradient for a ticket.

        When the worker pushes this gradient, it is applied with the learning rate `rate`.
        """
        with self.changed:
            self.pull_queue.append(worker)
            self._wait_until(lambda: self.pull_queue[0] == worker and self._admits_pull())
            self.pull_queue.popleft()
            self.changed.notify_all()
            self.pulled[worker] = self.shard.version
            self.tickets[worker] = (ticket, rate)
            self.pulls += 1
            self._record_event({"pull": ticket})
            return self.shard.values.detach().clone()

    def push(self, worker: int, gradient: Tensor) -> tuple[int, int]:
        """Push a gradient [n] and return the worker's next ticket and the staleness of the push.

        The call returns when the push has been applied or, in sync mode, when the pushes of all workers have arrived.
        """
        with self.changed:
            self.waiting_pushes[worker] = gradient
            while workers := self.policy.choose_pushes(self.waiting_pushes, self.pulled, self.shard.version):
                self._process_pushes(workers)
            self.changed.notify_all()
            self._wait_until(lambda: worker in self.answers)
            return self.answers.pop(worker)

    def compute_squared_norm(self) -> Tensor:
        """Return the squared norm of the gradient of the prepared step, a 0-d tensor."""
        with self.changed:
            return self.shard.average_gradients(self.prepared_gradients).double().square().sum()

    def apply_prepared_step(self, factor: float = 1.0) -> None:
        """Apply the prepared step, if there is one, and resume answering pulls.

        The gradient is multiplied by `factor`.
        """
        with self.changed:
            if self.prepared is not None:
                self.prepared(factor)
                self.prepared = None
                self.changed.notify_all()

    def abort_waiting_calls(self, error: BaseException) -> None:
        """Make all waiting calls raise RuntimeError after the loss of a worker."""
        with self.changed:
            self.failure = error
            self.changed.notify_all()

    def _process_pushes(self, workers: Sequence[int]) -> None:
        """Apply the pushes of the given workers as one step, and answer these workers.

        In sync mode, the step is only prepared.
        """
        ages = [self.shard.version - self.pulled.pop(worker) for worker in workers]
        tickets, rates = zip(*(self.tickets.pop(worker) for worker in workers), strict=True)
        rate = rates[0]
        if self.damp:
            rate /= max(1, ages[0])
        gradients = [self.waiting_pushes.pop(worker) for worker in workers]

        def take_step(factor: float) -> None:
            self.shard.apply_gradients(gradients, rate, factor)
            self.staleness.update(ages)
            clipping = {"factor": factor} if factor != 1 else {}
            self._record_event({"push": list(tickets), "rate": rate, **clipping})

        self.prepared = take_step
        self.prepared_gradients = gradients
        if self.policy.mode != "sync":
            self.apply_prepared_step()
        for worker, age in zip(workers, ages, strict=True):
            self.answers[worker] = (self.next_ticket, age)
            self.next_ticket += 1

    def _admits_pull(self) -> bool:
        return self.prepared is None and self.policy.admits_pull(self.pulled.values(), self.shard.version)

    def _record_event(self, event: dict[str, Any]) -> None:
        if self.records_events:
            self.events.append(event | {"version": self.shard.version})

    def _wait_until(self, is_ready: Callable[[], bool]) -> None:
        in_time = self.changed.wait_for(lambda: self.failure is not None or is_ready(), self.timeout)
        if self.failure is not None:
            raise CausedRuntimeError(f"a worker has been lost: {self.failure}", cause=Cause.LOST_PEER)
        if not in_time:
            raise RankTimeoutError(
                f"timed out: a server waited {self.timeout:.0f} s for the pushes of other workers; see their logs, or "
                "raise launch.step_timeout"
            )


def replay_recorded_steps(
    logs: Sequence[Sequence[Mapping[str, Any]]],
    values: Tensor,
    make_optimizer: MakeOptimizer,
    workers: int,
    compute_gradient: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """Replay the recorded steps of all servers in this process and return the final parameters [n].

    `logs` contains the events of each server, ordered by shard, and `values` [n] are the initial parameters.
    `compute_gradient` takes a ticket and the parameters [n] that the worker pulled for this ticket. The shards of these
    parameters may have different versions. The result is bitwise equal to the parameters of the run if the number of
    threads is the same. Raises ValueError if an event is missing from a log.
    """
    parts = split_vector_into_shards(len(values), len(logs))
    shards = [Shard(values[part], make_optimizer, workers) for part in parts]
    queues = [deque(log) for log in logs]
    pulled: dict[int, dict[int, Tensor]] = {}  # pulled values by ticket and server
    gradients: dict[int, Tensor] = {}  # gradients by ticket
    while any(queues):
        events_before = sum(map(len, queues))
        for server, (shard, events) in enumerate(zip(shards, queues, strict=True)):
            while events and gradients.keys() >= set(events[0].get("push", ())):
                event = events.popleft()
                if "push" in event:
                    pushed = [gradients[ticket][parts[server]] for ticket in event["push"]]
                    shard.apply_gradients(pushed, event["rate"], event.get("factor", 1.0))
                    continue
                ticket = event["pull"]
                pulls = pulled.setdefault(ticket, {})
                pulls[server] = shard.values.detach().clone()
                if len(pulls) == len(logs):
                    parameters = torch.cat([pulls[i] for i in range(len(logs))])
                    gradients[ticket] = compute_gradient(ticket, parameters)
        if sum(map(len, queues)) == events_before:
            next_events = [events[0] for events in queues if events]
            raise ValueError(f"the logs cannot be replayed beyond {next_events}, because an event is missing")
    return torch.cat([shard.values.detach() for shard in shards])
