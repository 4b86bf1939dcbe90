"""Settings that some experiments share, in addition to those of all experiments."""

from __future__ import annotations

from dataclasses import dataclass

from configs.shared import Experiment, at_least, between


@dataclass
class RanksPerNode(Experiment):
    """Settings of experiments with the same number of ranks on each host."""

    processes_per_node: int = at_least(0, 0)
    """Ranks per host. 0 uses the number in the cluster profile, or the number that torchrun or srun started; otherwise
    two on a single host and one on each of several hosts."""

    @property
    def processes(self) -> int:
        nodes = self.launch.nodes
        default = 2 if nodes == 1 else 1
        return nodes * (self.processes_per_node or default)


@dataclass
class InitialWeights(Experiment):
    """Settings of a model that can start from trained weights."""

    weights: str = "none"
    """State dict to start from, with the names of this project or of torchvision: a file, a checkpoint folder, or the
    id of a run. none initialises the weights randomly."""

    def list_paths(self) -> dict[str, str]:
        paths = super().list_paths()
        if self.weights != "none":
            paths["weights"] = self.weights
        return paths


@dataclass
class Sweep:
    """Settings of an experiment with a grid in configs/sweeps."""

    sweep: bool = False
    """Run a grid of settings, one run per point; afterwards write a table, a CSV file and a plot."""
    repeats: int = between(1, 100, 3)
    """Repetitions of each point of a sweep, in rounds over all points so that disturbances affect all equally."""
