"""Formulas for the gradients of a rank when they need most memory, while `fully_shard` has not divided all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from common.techniques.parallel_layout.model_shape import Layers, ParameterSize
from configs.layout import Layout


@dataclass(frozen=True)
class GradientCounts:
    """Numbers of gradients of the units of a GPT."""

    embedding: int
    block: int
    """Number of gradients of one block."""
    output: int
    """Number of gradients of the last norm and of the output layer."""

    @classmethod
    def add(
        cls,
        parameters: Mapping[str, ParameterSize],
        copied: Mapping[str, ParameterSize],
        count: Callable[[ParameterSize], int],
    ) -> GradientCounts:
        """Add the gradients of each unit. `copied` contains the copy of a tied table, which the output layer uses."""
        embedding = 0
        output = sum(count(size) for size in copied.values())
        blocks: Counter[str] = Counter()
        for name, size in parameters.items():
            layer = name.partition(".")[0]
            if layer.startswith("block"):
                blocks[layer] += count(size)
            elif layer == "embedding":
                embedding += count(size)
            else:
                output += count(size)
        return cls(embedding, max(blocks.values()), output)

    def sum_layers(self, layers: Layers) -> int:
        """Return the number of gradients of some layers."""
        total = layers.blocks * self.block
        if layers.has_embedding:
            total += self.embedding
        if layers.has_head:
            total += self.output
        return total


@dataclass(frozen=True)
class GradientSizes:
    """Numbers of gradients of a rank before and after `fully_shard` has divided them."""

    undivided: GradientCounts
    divided: GradientCounts

    @classmethod
    def count(
        cls, parameters: Mapping[str, ParameterSize], layout: Layout, copied: Mapping[str, ParameterSize] | None = None
    ) -> GradientSizes:
        undivided = GradientCounts.add(parameters, copied or {}, lambda size: size.count_undivided(layout))
        divided = GradientCounts.add(parameters, copied or {}, lambda size: size.count_local(layout))
        return cls(undivided, divided)

    def predict_pass(self, layers: Layers, *, is_first: bool) -> int:
        """Return the largest number of gradients during a backward pass of some layers that reduces gradients.

        The gradients of a block are reduced when the block ends. Those of the embedding, the last norm and the output
        layer are reduced at the end of the pass. A table that the embedding and the output layer share has its gradient
        only at the end. Unless the pass is the first one, divided gradients of earlier passes exist.
        """
        divided_blocks = layers.blocks * self.divided.block
        outside = self.undivided.sum_layers(Layers(0, layers.has_embedding, layers.has_head))
        before_last_block = self.undivided.sum_layers(Layers(1, has_embedding=False, has_head=layers.has_head))
        if is_first:
            return max(divided_blocks - self.divided.block + before_last_block, divided_blocks + outside)
        return self.divided.sum_layers(layers) + max(before_last_block, outside)

    def predict_stages(self, layers: Mapping[int, Layers], backwards: Sequence[int], microbatches: int) -> int:
        """Return the largest number of gradients of stages that reduce their gradients in their last backward pass.

        `backwards` contains the stage of each backward pass of the rank, in their order.
        """
        gradients: Counter[int] = Counter()  # present gradients by stage
        passes: Counter[int] = Counter()
        peak = 0
        for stage in backwards:
            passes[stage] += 1
            if passes[stage] < microbatches:
                gradients[stage] = self.undivided.sum_layers(layers[stage])
                peak = max(peak, gradients.total())
                continue
            if microbatches == 1:
                peak = max(peak, gradients.total() + self.predict_pass(layers[stage], is_first=True))
            gradients[stage] = self.divided.sum_layers(layers[stage])
            peak = max(peak, gradients.total())
        return peak
