"""Division of a transformer and its batches among ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from configs.batch_plan import format_nearest_multiples
from configs.pipeline import PipelineConfig


@dataclass(frozen=True)
class Layout:
    """Division of the layers, the parameters, the tokens and the samples of a batch among a known number of ranks.

    The number of ranks is the product of `replicas`, `stage_ranks`, `fsdp`, `context` and `tensor`. Consecutive ranks
    differ in the position in the tensor dimension first, because tensor parallelism communicates most. Replicas
    communicate least: they exchange gradients once per step.
    """

    tensor: int = 1
    """Number of ranks among which each matrix is divided."""
    sequence: bool = False
    """Whether the ranks of tensor parallelism also divide the tokens (sequence parallelism)."""
    context: int = 1
    """Number of ranks among which the tokens of each sample are divided, also inside of attention."""
    fsdp: int = 1
    """Number of ranks among which parameters, gradients and optimizer states are divided. The ranks of `context` divide
    them further."""
    reshard: bool = True
    """Whether the gathered parameters of a block are freed after its forward pass."""
    replicas: int = 1
    """Number of copies of the model."""
    stages: int = 1
    """Number of stages among which the layers are divided (pipeline parallelism)."""
    stages_per_process: int = 1
    """Number of stages per rank."""
    schedule: str = "1f1b"
    """Pipeline schedule, which has no effect with a single stage."""
    zero1: bool = False
    """Whether the ranks with the same parameters divide the optimizer state."""

    @property
    def stage_ranks(self) -> int:
        """Number of ranks among which the stages are divided."""
        return self.stages // self.stages_per_process

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.replicas * self.stage_ranks * self.fsdp * self.context * self.tensor

    @property
    def data_shards(self) -> int:
        """Number of shards of a batch. Ranks of stages, context and tensor parallelism process the same shard."""
        return self.replicas * self.fsdp

    @property
    def parameter_shards(self) -> int:
        """Number of ranks among which fsdp divides each parameter, or each shard of tensor parallelism."""
        return self.fsdp * self.context if self.fsdp > 1 else 1

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same parameters, or the same shards of parameters."""
        return self.replicas if self.fsdp > 1 else self.replicas * self.context

    @property
    def waits_in_forward(self) -> bool:
        """Whether ranks exchange activations in the forward pass."""
        return self.tensor > 1 or self.context > 1 or self.stages > 1

    def make_pipeline_config(self, microbatches: int) -> PipelineConfig:
        """Return the settings of the pipeline for a number of microbatches per step."""
        return PipelineConfig(
            schedule=self.schedule,
            stages=self.stages,
            stages_per_process=self.stages_per_process,
            microbatches=microbatches,
        )

    def check(self, sizes: Mapping[str, int], batch: int, microbatches: int, tokens: int) -> None:
        """Raise ValueError if the model or a batch cannot be divided among the ranks.

        `sizes` contains the sizes that tensor parallelism divides, by the names of their settings, such as heads and
        key_value_heads. `microbatches` is the number of microbatches of a batch, and `tokens` is the number of tokens
        in a sample.
        """
        if self.tensor > 1:
            for name, size in sizes.items():
                check_divisible(name, size, "tensor", self.tensor)
        self._check_tokens(tokens)
        divisor = self.data_shards * microbatches
        if batch % divisor:
            degrees = f"fsdp={self.fsdp} x replicas={self.replicas}"
            if microbatches > 1:
                degrees += f" x accumulate={microbatches}"
            nearest = format_nearest_multiples(batch, divisor)
            raise ValueError(f"batch={batch} cannot be divided evenly by {degrees}; use batch={nearest}")

    def _check_tokens(self, tokens: int) -> None:
        """Raise ValueError if the tokens of a sample cannot be divided among the ranks of context and of sequence."""
        parts = 1
        degrees = []
        if self.context > 1:
            parts *= 2 * self.context  # each rank has two chunks of equal length
            degrees.append(f"2 x context={self.context}")
        if self.sequence:
            parts *= self.tensor
            degrees.append(f"tensor={self.tensor}")
        if tokens % parts:
            raise ValueError(
                f"data.context={tokens} cannot be divided evenly by {' x '.join(degrees)}; use "
                f"data.context={format_nearest_multiples(tokens, parts)}"
            )


def check_divisible(name: str, size: int, degree_name: str, degree: int) -> None:
    """Raise ValueError if a size cannot be divided evenly by a degree of parallelism."""
    if size % degree:
        nearest = format_nearest_multiples(size, degree)
        raise ValueError(
            f"{name}={size} cannot be divided evenly by {degree_name}={degree}; use {name}={nearest}, or another "
            f"{degree_name}"
        )
