"""How many pushes a parameter server can serve where one worker's cable is slow: its rules, played in theory."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from common.techniques.parameter_server.server import StalenessPolicy

PUSHES = 2000  # that are played: where many are, the first ones hardly count


def play_turns(policy: StalenessPolicy, turns: Sequence[float]) -> float:
    """Return the pushes/s of workers whose turns, from the answer to a pull to the next request, take these seconds.

    The server answers those who wait in the order in which they came, and itself takes no time. Of workers whose pushes
    are applied together the quickest asks again first.
    """
    now, version, applied = 0.0, 0, 0
    waiting, pulled = list(range(len(turns))), dict[int, int]()
    held, computing = list[int](), list[tuple[float, int]]()
    while True:
        for worker in waiting[:]:
            if policy.admits_pull(pulled.values(), version):
                waiting.remove(worker)
                pulled[worker] = version
                heapq.heappush(computing, (now + turns[worker], worker))
        if applied >= PUSHES:
            return applied / now
        now, worker = heapq.heappop(computing)
        held.append(worker)
        answered = list[int]()
        while chosen := policy.choose_pushes(held, pulled, version):
            version, applied = version + 1, applied + len(chosen)
            for worker in chosen:
                held.remove(worker)
                del pulled[worker]
                answered.append(worker)
        waiting += sorted(answered, key=turns.__getitem__)


def compute_bound(policy: StalenessPolicy, free: float, others: float, carrying: float, processors: int) -> float:
    """Return the most pushes/s where the last worker's cable takes `carrying` seconds for a pull and a push.

    `free` are the pushes/s of all workers in asynchronous mode where no cable is slow, and `others` those of all but
    the last, without it. With so many processors for all hosts together a turn that has one for itself takes
    processors / free seconds. No mode makes more than `free`, or than `others` and what the last one's cable carries.
    """
    turn = min(processors, policy.workers) / free
    slow = turn + carrying
    return min(free, others + 1 / slow, play_turns(policy, [turn] * (policy.workers - 1) + [slow]))
