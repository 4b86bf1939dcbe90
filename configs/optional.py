"""Groups of settings that only some experiments have."""

from __future__ import annotations

from dataclasses import dataclass

from configs.shared import Experiment, at_least, between


@dataclass
class RanksPerNode(Experiment):
    """Settings for experiments with the same number of ranks on each host."""

    processes_per_node: int = at_least(0, 0)
    """Number of ranks per host. 0 uses the number in the cluster profile, or the number that torchrun or srun started.
    Without a cluster profile and without torchrun or srun, 0 means two ranks on a single host, or one rank on each of
    several hosts."""

    @property
    def processes(self) -> int:
        nodes = self.launch.nodes
        default = 2 if nodes == 1 else 1
        return nodes * (self.processes_per_node or default)


@dataclass
class InitialWeights(Experiment):
    """Settings for models that can start from trained weights."""

    weights: str = "none"
    """Initial weights of the model: a file, a checkpoint folder, or the id of a run. The parameter names in a file are
    those of this project or of torchvision. none initializes the weights randomly."""

    def list_paths(self) -> dict[str, str]:
        paths = super().list_paths()
        if self.weights != "none":
            paths["weights"] = self.weights
        return paths


@dataclass
class Sweep:
    """Settings for experiments that have a sweep grid in configs/sweeps."""

    sweep: bool = False
    """Run a grid of settings with one run per point, then write a table, a CSV file and a plot."""
    repeats: int = between(1, 100, 3)
    """Number of runs per point of a sweep. Each round of a sweep runs every point once, so that disturbances affect all
    points equally."""
