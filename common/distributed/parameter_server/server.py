"""Servers of a parameter server (Li et al. 2014, OSDI): each keeps a shard of the parameters and takes its steps.

A server answers pulls with its shard and applies pushed gradients by torch's own optimizer. Each optimizer step makes a
new version of the shard. The staleness of a push is the number of versions that were made between the pull that its
gradient was computed from and its application.

In sync mode a step is taken in two parts: all pushes of it are answered once all are there, and `take_prepared_step`
takes it. A worker that has its answers knows that every server has all pushes, so that a step of an elastic run, once
it counts on one rank, can be taken on each server, and until then on none.
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
    """Return the nearly equal shards of a vector. Raises UserError where a server would have none."""
    if servers > length:
        raise UserError(f"servers={servers}: the model has {format_count(length, 'parameter')}; use fewer servers")
    return [slice(length * i // servers, length * (i + 1) // servers) for i in range(servers)]


class Shard:
    """Consecutive part [n] of the flat parameter vector, and its optimizer."""

    def __init__(self, values: Tensor, make_optimizer: MakeOptimizer, workers: int) -> None:
        self.values = nn.Parameter(values.detach().clone())
        self.optimizer, self.workers = make_optimizer([self.values]), workers
        self.version = 0
        """Number of optimizer steps."""

    def step(self, gradients: Sequence[Tensor], rate: float) -> None:
        """Apply pushed gradients [n] together; each counts as its worker's share of the batch."""
        self.values.grad = functools.reduce(torch.add, gradients) / self.workers
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.version += 1


@dataclass(frozen=True)
class Policy:
    """Rules of when a pull is answered and a push applied.

    sync waits for the pushes of all workers, to apply them together; async applies each at once. bounded answers a
    pull, or applies a push, only if every outstanding push can still be applied with a staleness of at most
    `staleness`: stale synchronous parallel (Ho et al. 2013), counted in versions.
    """

    mode: Literal["sync", "async", "bounded"]
    staleness: int
    workers: int

    def admits_pull(self, pulled: Collection[int], version: int) -> bool:
        """Check whether a pull may be answered now; `pulled` are the versions that other workers compute with."""
        return self.mode != "bounded" or self._is_in_time([*pulled, version], version)

    def choose_pushes(self, held: Collection[int], pulled: Mapping[int, int], version: int) -> list[int]:
        """Return the workers whose pushes are applied now, together; none if all must wait.

        `held` are the workers whose pushes wait, in the order of arrival; `pulled` has, for each worker
        whose push is not applied yet, the version that it pulled.
        """
        if self.mode == "sync":
            return sorted(held) if len(held) == self.workers else []
        for worker in held:
            others = [of for other, of in pulled.items() if other != worker]
            if self.mode == "async" or self._is_in_time(others, version + 1):
                return [worker]
        return []

    def _is_in_time(self, pulled: Iterable[int], version: int) -> bool:
        """Check that pushes, applied from `version` on with the oldest pull first, do not become too stale."""
        return all(version + place - of <= self.staleness for place, of in enumerate(sorted(pulled)))


class Server:
    """Server of one shard. A worker calls `pull` and `push` in turn; workers may call them at the same time.

    Pulls are answered in the order in which they come, so that none waits for ever. Both wait as long as the policy
    demands, and raise TimeoutError after `timeout` seconds, RuntimeError after `fail`.
    """

    def __init__(
        self, shard: Shard, policy: Policy, timeout: float, *, damp: bool = False, record: bool = False
    ) -> None:
        """With `damp` a push is applied at the learning rate divided by its staleness (arXiv 1511.05950).

        With `record` all that is served is kept in `events`.
        """
        self.shard, self.policy, self.timeout, self.damp, self.record = shard, policy, timeout, damp, record
        self.changed = threading.Condition()
        self.asking: deque[int] = deque()
        self.pulled: dict[int, int] = {}
        self.tickets: dict[int, tuple[int, float]] = {}
        self.held: dict[int, Tensor] = {}
        self.answers: dict[int, tuple[int, int]] = {}
        self.failure: BaseException | None = None
        self.prepared: Callable[[], None] | None = None
        """In sync mode, the step whose pushes are all there, until it is taken."""
        self.next_ticket = 0
        self.pulls = 0
        """Answered pulls."""
        self.staleness: Counter[int] = Counter()
        """Applied pushes by their staleness."""
        self.events: list[dict[str, Any]] = []
        """Record of what was served, in its order: {"pull": ticket, "version": n} with the version that was given, and
        {"push": [tickets], "rate": x, "version": n} with the version that these pushes made."""

    def restart(self, done: int, workers: int) -> None:
        """Begin to serve these workers after so many steps; requests and pushes of a step that failed are dropped."""
        self.policy = dataclasses.replace(self.policy, workers=workers)
        self.shard.workers, self.next_ticket = workers, (done + 1) * workers
        self.failure = self.prepared = None
        for waiting in (self.asking, self.pulled, self.tickets, self.held, self.answers):
            waiting.clear()

    def pull(self, worker: int, ticket: int, rate: float) -> Tensor:
        """Return the shard's values [n] for the work of a ticket, whose push is to be applied at a learning rate."""
        with self.changed:
            self.asking.append(worker)
            self._wait(lambda: self.asking[0] == worker and self._admits_pull())
            self.asking.popleft()
            self.changed.notify_all()
            self.pulled[worker], self.tickets[worker] = self.shard.version, (ticket, rate)
            self.pulls += 1
            self._record_event({"pull": ticket})
            return self.shard.values.detach().clone()

    def push(self, worker: int, gradient: Tensor) -> tuple[int, int]:
        """Hand over a gradient [n]; return the worker's next ticket and the push's staleness.

        It returns once the push is applied, in sync mode once the pushes of all workers are there.
        """
        with self.changed:
            self.held[worker] = gradient
            while chosen := self.policy.choose_pushes(self.held, self.pulled, self.shard.version):
                self._answer(chosen)
            self.changed.notify_all()
            self._wait(lambda: worker in self.answers)
            return self.answers.pop(worker)

    def take_prepared_step(self) -> None:
        """Take the step whose pushes are all there, if there is one: pulls are answered again."""
        with self.changed:
            if self.prepared is not None:
                self.prepared()
                self.prepared = None
                self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Let all who wait raise: one of the workers is lost."""
        with self.changed:
            self.failure = error
            self.changed.notify_all()

    def _answer(self, workers: Sequence[int]) -> None:
        """Take the step of these workers' pushes, or prepare it, and answer them."""
        ages = [self.shard.version - self.pulled.pop(worker) for worker in workers]
        tickets, rates = zip(*(self.tickets.pop(worker) for worker in workers), strict=True)
        rate = rates[0] / max(1, ages[0]) if self.damp else rates[0]
        gradients = [self.held.pop(worker) for worker in workers]

        def take_step() -> None:
            self.shard.step(gradients, rate)
            self.staleness.update(ages)
            self._record_event({"push": list(tickets), "rate": rate})

        self.prepared = take_step
        if self.policy.mode != "sync":
            self.take_prepared_step()
        for worker, age in zip(workers, ages, strict=True):
            self.answers[worker] = self.next_ticket, age
            self.next_ticket += 1

    def _admits_pull(self) -> bool:
        return self.prepared is None and self.policy.admits_pull(self.pulled.values(), self.shard.version)

    def _record_event(self, event: dict[str, Any]) -> None:
        if self.record:
            self.events.append(event | {"version": self.shard.version})

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        in_time = self.changed.wait_for(lambda: self.failure is not None or is_ready(), self.timeout)
        if self.failure is not None:
            raise RuntimeError(f"a worker is lost: {self.failure}")
        if not in_time:
            raise TimeoutError(f"timed out: a server has waited {self.timeout:.0f} s for the other workers' pushes")


def repeat_served_steps(
    logs: Sequence[Sequence[Mapping[str, Any]]],
    values: Tensor,
    make_optimizer: MakeOptimizer,
    workers: int,
    compute_gradient: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """Repeat in this process what servers have served; return the parameters [n] at the end.

    `logs` are the events of each server, in the order of the shards, and `values` [n] the parameters before.
    `compute_gradient` gets a ticket and the parameters [n] that its worker had pulled, which the servers may have given
    in different versions. With the same number of threads the result is equal to the bit. Raises ValueError for logs
    that lack an event.
    """
    parts = split_vector(len(values), len(logs))
    shards = [Shard(values[part], make_optimizer, workers) for part in parts]
    left = [deque(log) for log in logs]
    pulled: dict[int, list[Tensor | None]] = {}
    gradients: dict[int, Tensor] = {}
    while any(left):
        before = sum(map(len, left))
        for number, (shard, events) in enumerate(zip(shards, left, strict=True)):
            while events and gradients.keys() >= set(events[0].get("push", ())):
                event = events.popleft()
                if "push" in event:
                    shard.step([gradients[ticket][parts[number]] for ticket in event["push"]], event["rate"])
                    continue
                given = pulled.setdefault(event["pull"], [None] * len(logs))
                given[number] = shard.values.detach().clone()
                held = [part for part in given if part is not None]
                if len(held) == len(logs):
                    gradients[event["pull"]] = compute_gradient(event["pull"], torch.cat(held))
        if sum(map(len, left)) == before:
            raise ValueError(f"no log goes on: {[events[0] for events in left if events]}; an event is missing")
    return torch.cat([shard.values.detach() for shard in shards])
