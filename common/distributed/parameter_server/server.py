"""Servers of a parameter server (Li et al. 2014, OSDI): each holds a shard of the parameters and updates it.

A server answers pulls with its shard and applies pushed gradients with a torch optimizer. Each optimizer step creates a
new version of the shard. The staleness of a push is the number of versions created between the pull that its gradient
was computed from and its application.

In sync mode a step has two phases: when all pushes have arrived, the server prepares the step and answers them; then
`take_prepared_step` takes it. A worker that has all answers knows that every server has all pushes. Thus, in an elastic
run, a step that one rank has completed can be taken on every server, and until then it is taken on none.
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

from common.core.errors import UserError
from common.core.text import format_count

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def split_vector(length: int, servers: int) -> list[slice]:
    """Return nearly equal shards of a vector. Raises UserError if a shard would be empty."""
    if servers > length:
        raise UserError(f"servers={servers}: the model has {format_count(length, 'parameter')}; use fewer servers")
    return [slice(length * i // servers, length * (i + 1) // servers) for i in range(servers)]


class Shard:
    """Consecutive part [n] of the flat parameter vector, and its optimizer."""

    def __init__(self, values: Tensor, make_optimizer: MakeOptimizer, workers: int) -> None:
        self.values = nn.Parameter(values.detach().clone())
        self.optimizer = make_optimizer([self.values])
        self.workers = workers
        self.version = 0
        """Number of optimizer steps."""

    def step(self, gradients: Sequence[Tensor], rate: float) -> None:
        """Apply pushed gradients [n] together; each is the gradient of one worker's share of the batch."""
        self.values.grad = functools.reduce(torch.add, gradients) / self.workers
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.version += 1


@dataclass(frozen=True)
class StalenessPolicy:
    """Rules for when a pull is answered and a push is applied.

    sync waits for the pushes of all workers and applies them together. async applies each push at once. bounded is
    stale synchronous parallel (Ho et al. 2013), counted in versions: it answers a pull or applies a push only if every
    outstanding push can still be applied with a staleness of at most `staleness`.
    """

    mode: Literal["sync", "async", "bounded"]
    max_staleness: int
    workers: int

    def admits_pull(self, pulled: Collection[int], version: int) -> bool:
        """Return whether a pull may be answered now; `pulled` are the versions other workers compute with."""
        return self.mode != "bounded" or self._limits_staleness([*pulled, version], version)

    def choose_pushes(self, waiting: Collection[int], pulled: Mapping[int, int], version: int) -> list[int]:
        """Return the workers whose pushes are applied now, together; none if all must wait.

        `waiting` are the workers whose pushes wait, in the order of arrival. `pulled` is the pulled version of each
        worker whose push has not been applied yet.
        """
        if self.mode == "sync":
            return sorted(waiting) if len(waiting) == self.workers else []
        for worker in waiting:
            other_versions = [pulled_version for other, pulled_version in pulled.items() if other != worker]
            if self.mode == "async" or self._limits_staleness(other_versions, version + 1):
                return [worker]
        return []

    def _limits_staleness(self, pulled: Iterable[int], version: int) -> bool:
        """Return whether pushes stay within the limit if applied from `version` on, oldest pull first."""
        return all(
            version + i - pulled_version <= self.max_staleness for i, pulled_version in enumerate(sorted(pulled))
        )


class ShardServer:
    """Server of one shard. Each worker alternates `pull` and `push`; workers may call them concurrently.

    Pulls are answered in order of arrival, so that none waits forever. Both methods block as long as the policy
    demands. They raise TimeoutError after `timeout` seconds, and RuntimeError after `fail`.
    """

    def __init__(
        self, shard: Shard, policy: StalenessPolicy, timeout: float, *, damp: bool = False, record: bool = False
    ) -> None:
        """With `damp`, divide the learning rate of a push by its staleness (arXiv 1511.05950).

        With `record`, record all pulls and steps in `events`.
        """
        self.shard = shard
        self.policy = policy
        self.timeout = timeout
        self.damp = damp
        self.records_events = record
        self.changed = threading.Condition()
        self.pull_queue: deque[int] = deque()
        """Workers whose pulls wait, in order of arrival."""
        self.pulled: dict[int, int] = {}
        """Pulled version of each worker whose push has not been applied yet."""
        self.tickets: dict[int, tuple[int, float]] = {}
        """Ticket and learning rate of the same workers."""
        self.waiting_pushes: dict[int, Tensor] = {}
        self.answers: dict[int, tuple[int, int]] = {}
        self.failure: BaseException | None = None
        self.prepared: Callable[[], None] | None = None
        """In sync mode, the step whose pushes have all arrived, until it is taken."""
        self.next_ticket = 0
        self.pulls = 0
        """Number of answered pulls."""
        self.staleness: Counter[int] = Counter()
        """Number of applied pushes by staleness."""
        self.events: list[dict[str, Any]] = []
        """Recorded pulls and steps in order: {"pull": ticket, "version": n} with the pulled version, and {"push":
        [tickets], "rate": x, "version": n} with the version that these pushes created."""

    def restart(self, done: int, workers: int) -> None:
        """Start to serve `workers` workers after `done` steps; drop requests and pushes of a failed step."""
        self.policy = dataclasses.replace(self.policy, workers=workers)
        self.shard.workers = workers
        self.next_ticket = (done + 1) * workers
        self.failure = None
        self.prepared = None
        for pending in (self.pull_queue, self.pulled, self.tickets, self.waiting_pushes, self.answers):
            pending.clear()

    def pull(self, worker: int, ticket: int, rate: float) -> Tensor:
        """Return the shard's values [n] for the work of a ticket; its push is applied with this learning rate."""
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
        """Push a gradient [n]; return the worker's next ticket and the push's staleness.

        It returns after the push is applied; in sync mode, after the pushes of all workers have arrived.
        """
        with self.changed:
            self.waiting_pushes[worker] = gradient
            while workers := self.policy.choose_pushes(self.waiting_pushes, self.pulled, self.shard.version):
                self._answer_pushes(workers)
            self.changed.notify_all()
            self._wait_until(lambda: worker in self.answers)
            return self.answers.pop(worker)

    def take_prepared_step(self) -> None:
        """Take the prepared step, if any; afterwards pulls are answered again."""
        with self.changed:
            if self.prepared is not None:
                self.prepared()
                self.prepared = None
                self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make all waiting calls raise: a worker is lost."""
        with self.changed:
            self.failure = error
            self.changed.notify_all()

    def _answer_pushes(self, workers: Sequence[int]) -> None:
        """Answer these workers' pushes and take their step; in sync mode only prepare it."""
        ages = [self.shard.version - self.pulled.pop(worker) for worker in workers]
        tickets, rates = zip(*(self.tickets.pop(worker) for worker in workers), strict=True)
        rate = rates[0]
        if self.damp:
            rate /= max(1, ages[0])
        gradients = [self.waiting_pushes.pop(worker) for worker in workers]

        def take_step() -> None:
            self.shard.step(gradients, rate)
            self.staleness.update(ages)
            self._record_event({"push": list(tickets), "rate": rate})

        self.prepared = take_step
        if self.policy.mode != "sync":
            self.take_prepared_step()
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
            raise RuntimeError(f"a worker is lost: {self.failure}")
        if not in_time:
            raise TimeoutError(f"timed out: a server waited {self.timeout:.0f} s for the pushes of the other workers")


def repeat_served_steps(
    logs: Sequence[Sequence[Mapping[str, Any]]],
    values: Tensor,
    make_optimizer: MakeOptimizer,
    workers: int,
    compute_gradient: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """Repeat recorded steps of servers in this process; return the final parameters [n].

    `logs` are the events of each server, ordered by shard; `values` [n] are the initial parameters. `compute_gradient`
    takes a ticket and the parameters [n] that its worker pulled; the servers may have sent them in different versions.
    With the same number of threads the result is bit-identical. Raises ValueError if a log lacks an event.
    """
    parts = split_vector(len(values), len(logs))
    shards = [Shard(values[part], make_optimizer, workers) for part in parts]
    queues = [deque(log) for log in logs]
    pulled: dict[int, dict[int, Tensor]] = {}  # by ticket and server
    gradients: dict[int, Tensor] = {}  # by ticket
    while any(queues):
        events_before = sum(map(len, queues))
        for server, (shard, events) in enumerate(zip(shards, queues, strict=True)):
            while events and gradients.keys() >= set(events[0].get("push", ())):
                event = events.popleft()
                if "push" in event:
                    pushed = [gradients[ticket][parts[server]] for ticket in event["push"]]
                    shard.step(pushed, event["rate"])
                    continue
                ticket = event["pull"]
                pulls = pulled.setdefault(ticket, {})
                pulls[server] = shard.values.detach().clone()
                if len(pulls) == len(logs):
                    parameters = torch.cat([pulls[i] for i in range(len(logs))])
                    gradients[ticket] = compute_gradient(ticket, parameters)
        if sum(map(len, queues)) == events_before:
            next_events = [events[0] for events in queues if events]
            raise ValueError(f"the logs cannot be continued at {next_events}; an event is missing")
    return torch.cat([shard.values.detach() for shard in shards])
