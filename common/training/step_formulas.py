"""Formulas for the memory and the messages of a step, which a run stores beside the measurements of StepMeter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.ranks.rendezvous import World
from common.runs.result import ReportData

STATE = "rank_state_formula"
"""Bytes of the training state of a rank."""
ACTIVATIONS = "rank_activation_formula"
"""Bytes of the activations that a rank keeps at the same time."""
SENT = "rank_sent_formula"
"""Bytes that a rank sends in a step."""
SAMPLE_SHARE = "rank_sample_share"
"""Part (0 to 1) of the activations of one process that a rank keeps, if there is no formula for activations."""


def gather_formulas(predicted: Mapping[str, float], world: World) -> ReportData:
    """Report the values of all ranks, by the names above. A value without a formula is omitted on all ranks.

    All ranks must call this function.
    """
    return make_report(world.gather(predicted))


def make_report(by_rank: Sequence[Mapping[str, float]]) -> ReportData:
    """Return the report on the values of all ranks, or an empty report without ranks."""
    measured = {}
    for name in by_rank[0] if by_rank else ():
        measured[name] = [predicted[name] for predicted in by_rank]
    return ReportData(measured=measured)
