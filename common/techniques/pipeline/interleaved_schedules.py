"""Schedules that alternate between forwards and backwards after a warm-up: 1F1B, interleaved 1F1B and zero bubble.

In interleaved 1F1B and zero bubble, several stages per rank shorten the bubble. The microbatches are divided into
rounds. A rank computes all microbatches of a round in one of its stages before it continues with its next stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from common.techniques.pipeline.schedules import Action, Schedule, find_missing_dependency, list_local_stages


def make_1f1b_schedule(ranks: int, stages: int, microbatches: int) -> Schedule:
    """Return the 1F1B schedule, in which each backward starts as soon as it is ready.

    The schedule is called PipeDream-Flush by Narayanan et al. 2021 (arXiv 2006.09503), section 2. At most `stages - s`
    microbatches are in flight at stage s. 1F1B takes as long as GPipe but needs less memory. This function builds the
    schedule by simulating ticks of equal length.
    """
    plan: Schedule = [[] for _ in range(ranks)]
    done: set[Action] = set()
    in_flight = [0] * stages

    def choose_action(rank: int) -> Action | None:
        """Return an action of a rank that can start now. Backwards have priority."""
        for kind in "BF":
            for stage in reversed(list_local_stages(rank, ranks, stages)):
                if kind == "F" and in_flight[stage] >= stages - stage:
                    continue
                for microbatch in range(microbatches):
                    action = Action(kind, stage, microbatch)
                    if action not in done and find_missing_dependency(action, stages, done) is None:
                        return action
        return None

    while len(done) < 2 * stages * microbatches:
        tick = [action for rank in range(ranks) if (action := choose_action(rank))]
        for action in tick:
            in_flight[action.stage] += 1 if action.kind == "F" else -1
            plan[action.stage % ranks].append(action)
        done.update(tick)
    return plan


def make_interleaved_1f1b_schedule(ranks: int, stages: int, microbatches: int) -> Schedule:
    """Return interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

    With v stages per rank, the idle time at the start and at the end of a step is 1/v of that of 1F1B. The number of
    microbatches need not be a multiple of the number of ranks.
    """
    rounds = split_into_rounds(ranks, microbatches)
    plan: Schedule = []
    for rank in range(ranks):
        local_stages = list_local_stages(rank, ranks, stages)
        forwards = list_passes("F", local_stages, rounds)
        backwards = list_passes("B", local_stages[::-1], rounds)
        warmup = (len(local_stages) - 1) * len(rounds[0]) + 2 * (ranks - 1 - rank)
        actions = forwards[:warmup]
        for pair in zip_longest(forwards[warmup:], backwards):
            actions += [action for action in pair if action]
        plan.append(actions)
    return plan


def make_zero_bubble_schedule(ranks: int, stages: int, microbatches: int) -> Schedule:
    """Return the zero bubble schedule ZB-H1 (Qi et al. 2023, arXiv 2401.10241, section 2.1).

    The first `rank` gradients of weights are postponed to the end of the step, where a rank would otherwise be idle. A
    rank stores at most as many activations as in 1F1B.
    """
    rounds = split_into_rounds(ranks, microbatches)
    plan: Schedule = []
    for rank in range(ranks):
        local_stages = list_local_stages(rank, ranks, stages)
        forwards = list_passes("F", local_stages, rounds)
        input_gradients = list_passes("I", local_stages[::-1], rounds)
        weight_gradients = list_passes("W", local_stages[::-1], rounds)
        warmup = (len(local_stages) - 1) * len(rounds[0]) + ranks - 1 - rank
        actions = forwards[:warmup]
        for number, pair in enumerate(zip_longest(forwards[warmup:], input_gradients)):
            actions += [action for action in pair if action]
            if number >= rank:
                actions.append(weight_gradients[number - rank])
        postponed = min(rank, len(weight_gradients))
        plan.append(actions + weight_gradients[len(weight_gradients) - postponed :])
    return plan


def split_into_rounds(ranks: int, microbatches: int) -> list[range]:
    """Return the microbatches of each round.

    Each round has at least as many microbatches as there are ranks, if possible. Longer rounds come first, because a
    rank would otherwise wait for forwards that follow in its own order.
    """
    count = max(1, microbatches // ranks)
    size, longer_rounds = divmod(microbatches, count)
    rounds = []
    start = 0
    for number in range(count):
        end = start + size + (1 if number < longer_rounds else 0)
        rounds.append(range(start, end))
        start = end
    return rounds


def list_passes(kind: str, stages: Sequence[int], rounds: Sequence[range]) -> list[Action]:
    """Return the passes of one kind in the order in which a rank executes them."""
    passes = []
    for microbatches in rounds:
        for stage in stages:
            passes += [Action(kind, stage, microbatch) for microbatch in microbatches]
    return passes
