"""Settings of a sweep, for every experiment that can run a grid of its settings."""

from __future__ import annotations

from dataclasses import dataclass

from configs.shared import between


@dataclass
class Sweep:
    sweep: bool = False
    """Run a grid of settings, each a run of its own, and end with a table, a CSV file and a plot."""
    repeats: int = between(1, 100, 3)
    """How often a sweep runs each setting; round by round, so that all settings see the same disturbances."""
