"""A bound on the pushes that a parameter server can serve with one slow cable, from a simulation of its rules."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from common.techniques.parameter_server.server import StalenessPolicy

PUSHES = 2000  # enough that the first ones hardly count


class Simulation:
    """A server and workers whose turns, from the answer to a pull to the next request, take given seconds.

    The server answers requests in the order in which they came, and itself takes no time. Of workers whose pushes are
    applied together the quickest asks again first.
    """

    def __init__(self, policy: StalenessPolicy, turns: Sequence[float]) -> None:
        self.policy = policy
        self.turns = turns
        self.now = 0.0
        self.version = 0
        self.applied = 0  # pushes
        self.waiting = list(range(len(turns)))  # workers that wait for the answer to a pull
        self.pulled: dict[int, int] = {}  # the version that each worker computes with
        self.pushed: list[int] = []  # workers whose pushes are not applied yet
        self.computing: list[tuple[float, int]] = []  # a heap of the ends of turns

    def answer_pulls(self) -> None:
        """Let the workers begin a turn whose pulls the policy admits."""
        for worker in self.waiting[:]:
            if self.policy.admits_pull(self.pulled.values(), self.version):
                self.waiting.remove(worker)
                self.pulled[worker] = self.version
                heapq.heappush(self.computing, (self.now + self.turns[worker], worker))

    def take_push(self) -> None:
        """Wait for the next push, and apply the pushes that the policy chooses."""
        self.now, sender = heapq.heappop(self.computing)
        self.pushed.append(sender)
        answered: list[int] = []
        while workers := self.policy.choose_pushes(self.pushed, self.pulled, self.version):
            self.version += 1
            self.applied += len(workers)
            for worker in workers:
                self.pushed.remove(worker)
                del self.pulled[worker]
                answered.append(worker)
        self.waiting += sorted(answered, key=self.turns.__getitem__)


def play_turns(policy: StalenessPolicy, turns: Sequence[float]) -> float:
    """Return the pushes/s of workers whose turns take these seconds."""
    simulation = Simulation(policy, turns)
    simulation.answer_pulls()
    while simulation.applied < PUSHES:
        simulation.take_push()
        simulation.answer_pulls()
    return simulation.applied / simulation.now


def compute_bound(policy: StalenessPolicy, free: float, without_slow: float, carrying: float, processors: int) -> float:
    """Return the most pushes/s where the last worker's cable takes `carrying` seconds for a pull and a push.

    `free` are the pushes/s of all workers in asynchronous mode where no cable is slow, and `without_slow` those of all
    but the last, without it. With so many processors for all hosts together a turn that has one for itself takes
    processors / free seconds. No mode makes more than `free`, or than `without_slow` and what the last one's cable
    carries.
    """
    turn = min(processors, policy.workers) / free
    slow_turn = turn + carrying
    turns = [turn] * (policy.workers - 1) + [slow_turn]
    return min(free, without_slow + 1 / slow_turn, play_turns(policy, turns))
