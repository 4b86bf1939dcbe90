"""Settings for experiments/mnist_pipeline.py."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from configs.batch_plan import BatchPlan
from configs.fields import between, flat
from configs.networks import network_field
from configs.pipeline import PipelineConfig, PipelineExperiment
from configs.shared import Regularization


@dataclass(frozen=True)
class Config(PipelineExperiment):
    """Settings for pipeline parallelism on MNIST."""

    smallest_settings: ClassVar[tuple[str, ...]] = ("batch=16", "microbatches=2")

    model: str = network_field("mlp", "mlp")
    """Network to train. mlp has `depth` hidden layers of `width` units. FILE.py:Class is a custom network, a subclass
    of nn.Sequential whose children are the layers; `width` and `depth` then have no effect."""
    width: int = between(2, 65_536, 128)
    """Number of units per hidden layer. If `depth` is greater than 1, the last hidden layer has half as many units."""
    depth: int = between(1, 256, 2)
    """Number of hidden layers. A depth of 2 with width=128 gives the 784-128-64-10 network."""
    pipeline: PipelineConfig = flat(PipelineConfig)
    regularization: Regularization = flat(Regularization)

    def make_pipeline_config(self) -> PipelineConfig:
        return self.pipeline

    @property
    def processes(self) -> int:
        return self.pipeline.processes

    @property
    def batch_plan(self) -> BatchPlan:
        return BatchPlan(self.batch, 1, self.pipeline.microbatches)

    @property
    def estimated_parameters(self) -> float:
        if self.model != "mlp":
            return 0
        last_hidden = self.width // 2 if self.depth > 1 else self.width
        sizes = [28 * 28, *[self.width] * (self.depth - 1), last_hidden, 10]
        return sum((inputs + 1) * outputs for inputs, outputs in pairwise(sizes))  # weights and biases

    def check(self) -> None:
        self.pipeline.check(self.batch)
        if self.model == "mlp":
            self.check_layers()
        super().check()

    def check_layers(self) -> None:
        """Raise ValueError if mlp cannot be split as set."""
        stages = self.pipeline.stages
        split = self.pipeline.split
        layers = self.depth + 1
        if stages > layers:
            remedy = f"set stages to at most {layers}, or depth to at least {stages - 1}"
            raise ValueError(f"stages={stages} exceeds the {layers} layers of the model; {remedy}")
        names = [f"fc{i}" for i in range(2, layers + 1)]
        in_order = [name for name in names if name in split]
        if split != in_order:
            raise ValueError(
                f"split=[{','.join(split)}] must list layers of the model; "
                f"use {', '.join(names)}, each at most once and in this order"
            )
