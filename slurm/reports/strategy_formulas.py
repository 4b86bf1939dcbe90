"""Formulas for the memory and the messages of a run, with which the table of strategies compares its measurements.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.runs.result import Result


@dataclass(frozen=True)
class RankFormulas:
    """Values of formulas for the ranks whose measurements a run reports; None without a formula."""

    state_bytes: float | None = None
    """Training state of the rank that needs most memory."""
    activation_bytes: float | None = None
    """Activations of the same rank."""
    sample_share: float | None = None
    """Part (0 to 1) of the activations of one process that this rank keeps, if there is no formula for them."""
    sent_bytes: float | None = None
    """Bytes that the rank that sends most sends in a step."""

    @classmethod
    def read(cls, result: Result) -> RankFormulas:
        """Return the values of a result."""
        measured = result.measured
        states = measured.get("rank_state_bytes") or []
        activations = measured.get("rank_activation_bytes") or []
        memory = [sum(pair) for pair in zip(states, activations, strict=False)]
        return cls(
            state_bytes=find_value(measured, "rank_state_formula", memory),
            activation_bytes=find_value(measured, "rank_activation_formula", memory),
            sample_share=find_value(measured, "rank_sample_share", memory),
            sent_bytes=find_value(measured, "rank_sent_formula", measured.get("rank_sent_bytes") or []),
        )

    def predict_memory(self, process_activations: float | None) -> float | None:
        """Return the bytes of training state and activations, or None if one of them is not known.

        `process_activations` are the measured bytes of one process; None if it was not measured.
        """
        activations = self.activation_bytes
        if activations is None and self.sample_share is not None and process_activations is not None:
            activations = self.sample_share * process_activations
        return None if self.state_bytes is None or activations is None else self.state_bytes + activations


def find_value(measured: Mapping[str, Any], name: str, sizes: Sequence[float]) -> float | None:
    """Return the value of the rank with the largest size, or None if there is no formula."""
    values = measured.get(name) or []
    if not sizes or len(values) != len(sizes):
        return None
    return float(values[list(sizes).index(max(sizes))])


def compute_deviation(size: float | None, formula: float | None) -> float | None:
    """Return the relative difference of a measurement from its formula, or None if there is nothing to compare."""
    return size / formula - 1 if formula and size is not None else None


def format_deviation(deviations: Sequence[float | None], missing: str) -> str:
    """Return the largest deviation of several runs as a percentage."""
    known = [deviation for deviation in deviations if deviation is not None]
    return f"{max(known, key=abs):+.1%}" if known else missing
