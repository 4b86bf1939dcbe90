"""Sizes of a GPT, of its parameters and of a microbatch, which the formulas use."""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.models.gpt import ShardDims
from configs.layout import Layout

TABLE = "embedding.weight"
"""Name of the table of token vectors."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT and of one microbatch of a rank."""

    width: int
    layers: int
    """Number of blocks."""
    heads: int
    key_value_heads: int
    hidden: int
    is_gated: bool
    """True for SwiGLU, which has a gate."""
    vocabulary: int
    context: int
    samples: int
    """Number of samples of a rank in a microbatch."""
    microbatches: int
    dropout: bool
    element_bytes: int
    """Size of a number: 4 for float32."""
    recompute: str = "none"
    """Which activations are computed again in the backward pass: none, blocks or selective."""

    def count_tokens(self, layout: Layout) -> int:
        """Return the number of tokens of a rank in a microbatch."""
        return self.samples * self.context // layout.context

    @property
    def keys_values_width(self) -> float:
        """Size of the keys and values of a token."""
        return 2 * self.width * self.key_value_heads / self.heads


@dataclass(frozen=True)
class Layers:
    """Layers of a model, or of a stage of a model."""

    blocks: int
    has_embedding: bool = True
    has_head: bool = True
    """True if the last norm, the output layer and the loss belong to these layers."""


@dataclass(frozen=True)
class ParameterSize:
    """Shape of a parameter, and the dimensions in which it is divided among ranks."""

    shape: tuple[int, ...]
    dims: ShardDims

    def count_local(self, layout: Layout) -> int:
        """Return the number of values that the first rank stores. An uneven division gives it the largest shard."""
        sizes = self._divide_by_tensor(layout)
        sizes[self.dims.fsdp] = -(-sizes[self.dims.fsdp] // layout.parameter_shards)
        return math.prod(sizes)

    def count_undivided(self, layout: Layout) -> int:
        """Return the number of values after the shards of fsdp are gathered, without padding."""
        return math.prod(self._divide_by_tensor(layout))

    def _divide_by_tensor(self, layout: Layout) -> list[int]:
        """Return the shape after division among the ranks of tensor parallelism."""
        sizes = list(self.shape)
        if self.dims.tensor is not None:
            sizes[self.dims.tensor] //= layout.tensor
        return sizes

    def count_gathered(self, layout: Layout) -> int:
        """Return the number of values after the shards of fsdp are gathered, which are padded to equal sizes."""
        return layout.parameter_shards * self.count_local(layout)
