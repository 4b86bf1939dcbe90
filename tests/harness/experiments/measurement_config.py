"""Config of an experiment that trains no model, for tests."""

from __future__ import annotations

import dataclasses

from configs.shared import Experiment


@dataclasses.dataclass(frozen=True)
class Measurement(Experiment):
    """Settings of a measurement on one rank."""

    sizes: list[str] = dataclasses.field(default_factory=list)
    """Sizes to measure."""
    processes = 1
