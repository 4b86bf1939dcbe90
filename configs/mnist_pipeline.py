"""Settings of experiments/mnist_pipeline.py."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from configs.batch_plan import BatchPlan
from configs.pipeline import PipelineConfig
from configs.shared import Experiment, between


@dataclass
class Config(PipelineConfig, Experiment):
    """Settings of pipeline parallelism on MNIST."""

    width: int = between(2, 65_536, 128)
    """Units in each hidden layer but the last, which has half as many."""
    depth: int = between(1, 256, 2)
    """Hidden layers; 2 with width=128 is the 784-128-64-10 network."""

    @property
    def batch_plan(self) -> BatchPlan:
        return BatchPlan(self.batch, 1, self.microbatches)

    @property
    def estimated_parameters(self) -> float:
        sizes = [28 * 28, *[self.width] * (self.depth - 1), self.width // 2 if self.depth > 1 else self.width, 10]
        return sum(before * after + after for before, after in pairwise(sizes))

    def check(self) -> None:
        self.check_pipeline(self.batch)
        layers = self.depth + 1
        if self.stages > layers:
            remedy = f"set stages to at most {layers}, or depth to at least {self.stages - 1}"
            raise ValueError(f"stages={self.stages} exceeds the {layers} layers of the model; {remedy}")
        names = [f"fc{i}" for i in range(2, layers + 1)]
        if any(name not in names for name in self.split) or self.split != sorted(set(self.split), key=names.index):
            what = f"split=[{','.join(self.split)}] must name layers of {', '.join(names)}"
            raise ValueError(f"{what}, each once and in their order")
        super().check()
