"""Schedules in which each rank holds two stages, placed in the shape of a V: ZBV and DualPipeV.

Of 2p stages, rank r holds stage r and stage 2p - 1 - r. A microbatch therefore passes through the ranks in order, and
then in reverse order. Rank 0 holds the first and the last stage.
"""

from __future__ import annotations

from collections import Counter

from common.techniques.pipeline.schedules import Action, Schedule


class RankOrder:
    """The order in which one rank executes actions.

    A step is written as the kind of an action and the number of the rank's stage, as in the papers: F0 is a forward in
    the rank's first stage, and I1 is the gradient of the input in its second stage. Each step processes the next
    microbatch. W is the oldest gradient of weights that is missing, in either stage.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.stages = (rank, 2 * ranks - 1 - rank)
        self.actions: list[Action] = []
        self.counts: Counter[tuple[str, int]] = Counter()
        """Number of forwards (F) and of backwards (B) so far, by kind and stage."""
        self.missing: list[Action] = []
        """Gradients of weights that are missing, oldest first."""

    def add(self, steps: str, repeats: int = 1) -> None:
        """Append steps, such as "F0 B1", `repeats` times."""
        for step in steps.split() * repeats:
            if step.startswith("W"):
                self._add_weight_gradient(step)
            else:
                self._add_pass(step[0], self.stages[int(step[1])])

    def _add_pass(self, kind: str, stage: int) -> None:
        counter = ("F" if kind == "F" else "B", stage)
        microbatch = self.counts[counter]
        self.counts[counter] += 1
        self.actions.append(Action(kind, stage, microbatch))
        if kind == "I":
            self.missing.append(Action("W", stage, microbatch))

    def _add_weight_gradient(self, step: str) -> None:
        stages = self.stages if step == "W" else (self.stages[int(step[1])],)
        action = next(action for action in self.missing if action.stage in stages)
        self.missing.remove(action)
        self.actions.append(action)


def make_zbv_schedule(ranks: int, stages: int, microbatches: int) -> Schedule:
    """Return the zero bubble schedule ZB-V (Qi et al. 2023, arXiv 2401.10241, section 6).

    Between its first and its last action, no rank is idle if F, I and W take equally long and there are at least
    2 * ranks - 1 microbatches. A rank stores at most as many activations as in 1F1B.
    """
    check_stages(ranks, stages)
    planned = max(2 * ranks - 1, microbatches)  # with fewer microbatches, the actions of those missing are left out
    plan: Schedule = []
    for rank in range(ranks):
        following = ranks - 1 - rank
        order = RankOrder(rank, ranks)
        # warm-up
        order.add("F0", 2 * following + 1)
        order.add("F1 F0", rank)
        order.add("F1 I1 W1", following + 1)
        # steady phase
        order.add("F0 I0 W0 F1 I1 W1", planned - ranks - following)
        order.add("I0 W0 F1 I1 W1", following)
        # cool-down
        order.add("I0 I1", rank)
        order.add("I0 W0", following + 1)
        order.add("W1", rank)
        order.add("W0", rank)
        plan.append([action for action in order.actions if action.microbatch < microbatches])
    return plan


def make_dualpipev_schedule(ranks: int, stages: int, microbatches: int) -> Schedule:
    """Return the schedule DualPipeV, a variant of DualPipe (DeepSeek-AI 2024, arXiv 2412.19437, section 3.2.1).

    The source is https://github.com/deepseek-ai/DualPipe. A step of the steady phase consists of a forward in one stage
    and a backward in the other stage. DualPipeV is intended for devices that overlap the two; the built-in engine
    executes them one after the other. Only some of the first and of the last backwards are split. There must be at
    least as many microbatches as stages.
    """
    check_stages(ranks, stages)
    if microbatches < stages:
        raise ValueError(f"dualpipev needs at least as many microbatches as stages ({stages}), got {microbatches}")
    plan: Schedule = []
    for rank in range(ranks):
        following = ranks - 1 - rank
        order = RankOrder(rank, ranks)
        order.add("F0", 2 * following)
        order.add("F0 F1", rank + 1)
        order.add("I1 W F1", following)
        order.add("F0 B1 F1 B0", microbatches - ranks - following)
        order.add("B1 F1 B0", following)
        # of the next 2 (rank + 1) backwards, which alternate between the stages, the second half is split
        kinds = "B" * (rank + 1) + "I" * (rank + 1)
        for number, kind in enumerate(kinds):
            order.add(f"{kind}{1 - number % 2}")
        order.add("W I0", following)
        order.add("W", rank + 1)
        plan.append(order.actions)
    return plan


def check_stages(ranks: int, stages: int) -> None:
    """Raise ValueError unless each rank has two stages."""
    if stages != 2 * ranks:
        raise ValueError(f"the schedule needs 2 stages per rank, got {stages} stages for {ranks} ranks")
