"""Settings that some experiments share, beside those that all have."""

from __future__ import annotations

from dataclasses import dataclass

from configs.shared import Experiment, at_least, between


@dataclass
class RanksPerNode(Experiment):
    """Settings of ranks that are equally many on each host."""

    processes_per_node: int = at_least(0, 0)
    """Ranks on each host; 0: in a job as the profile says, under torchrun and srun as many as they start, else two on
    one host and one on each of several."""

    @property
    def processes(self) -> int:
        nodes = self.launch.nodes
        return nodes * (self.processes_per_node or (2 if nodes == 1 else 1))


@dataclass
class InitialWeights(Experiment):
    """Settings of a model that can begin with trained weights."""

    weights: str = "none"
    """State dict to begin with, under our names or torchvision's: a file, a checkpoint folder, or a run's id; none
    draws random weights."""

    def list_paths(self) -> dict[str, str]:
        return super().list_paths() | ({"weights": self.weights} if self.weights != "none" else {})


@dataclass
class Sweep:
    """Settings of an experiment with a grid in configs/sweeps."""

    sweep: bool = False
    """Run a grid of settings, each a run of its own, and end with a table, a CSV file and a plot."""
    repeats: int = between(1, 100, 3)
    """How often a sweep runs each setting; round by round, so that all settings see the same disturbances."""
