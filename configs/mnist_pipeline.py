"""Settings of experiments/mnist_pipeline.py."""

from __future__ import annotations

from dataclasses import dataclass

from configs.pipeline import Pipeline
from configs.shared import Experiment, at_least


@dataclass
class Config(Pipeline, Experiment):
    width: int = at_least(2, 128)
    """Units in each hidden layer but the last, which has half as many."""
    depth: int = at_least(1, 2)
    """Hidden layers; 2 with width=128 is the 784-128-64-10 network."""

    def check(self) -> None:
        if self.data.name not in ("mnist", "digits"):
            raise ValueError(f"data.name={self.data.name}: this network takes 28x28 images; use mnist or digits")
        self.check_pipeline(self.batch)
        layers = self.depth + 1
        if self.stages > layers:
            raise ValueError(
                f"stages={self.stages} exceeds the {layers} layers of the model; "
                f"set stages to at most {layers}, or depth to at least {self.stages - 1}"
            )
        super().check()
