"""Formulas for the memory, messages and floating-point operations of a GPT under a layout.

The formulas need only sizes, so they can be evaluated before a run. Tests compare them with measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from common.models.gpt import ShardDims
from configs.layout import Layout

ADAM_STATES = 2
"""Number of tensors of the size of a parameter in the state of Adam and AdamW."""
STEP_BYTES = 4
"""Size of the number of steps that Adam stores for each parameter."""
INDEX_BYTES = 8
"""Size of a token."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT and of one microbatch of a rank."""

    width: int
    layers: int
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

    def count_tokens(self, layout: Layout) -> int:
        """Return the number of tokens of a rank in a microbatch."""
        return self.samples * self.context // layout.context

    @property
    def keys_values_width(self) -> float:
        """Size of the keys and values of a token."""
        return 2 * self.width * self.key_value_heads / self.heads


@dataclass(frozen=True)
class ParameterSize:
    """Shape of a parameter, and the dimensions in which it is divided among ranks."""

    shape: tuple[int, ...]
    dims: ShardDims

    def count_local(self, layout: Layout) -> int:
        """Return the number of values that the first rank stores. An uneven division gives it the largest shard."""
        sizes = list(self.shape)
        if self.dims.tensor is not None:
            sizes[self.dims.tensor] //= layout.tensor
        sizes[self.dims.fsdp] = -(-sizes[self.dims.fsdp] // layout.parameter_shards)
        return math.prod(sizes)

    def count_gathered(self, layout: Layout) -> int:
        """Return the number of values after the shards of fsdp are gathered, which are padded to equal sizes."""
        return layout.parameter_shards * self.count_local(layout)


def predict_state_bytes(parameters: Mapping[str, ParameterSize], layout: Layout, element_bytes: int) -> dict[str, int]:
    """Return the bytes of parameters, gradients and AdamW's state on the first rank."""
    stored = element_bytes * sum(size.count_local(layout) for size in parameters.values())
    optimizer = ADAM_STATES * stored + STEP_BYTES * len(parameters)
    return {"parameters": stored, "gradients": stored, "optimizer": optimizer}


def predict_peak_parameter_bytes(parameters: Mapping[str, ParameterSize], layout: Layout, element_bytes: int) -> int:
    """Return the bytes of parameters on the first rank, including gathered ones, at the peak of a step.

    With fully_shard, the embedding, the last norm and the head stay gathered. With `reshard`, a single block is
    gathered at a time; otherwise, all blocks are gathered at the end of the forward pass. The buffers of all-gathers
    are not included.
    """
    stored = sum(size.count_local(layout) for size in parameters.values())
    if layout.fsdp == 1:
        return stored * element_bytes
    blocks: dict[str, int] = {}
    outside = 0
    for name, size in parameters.items():
        layer = name.partition(".")[0]
        if layer.startswith("block"):
            blocks[layer] = blocks.get(layer, 0) + size.count_gathered(layout)
        else:
            outside += size.count_gathered(layout)
    inside = max(blocks.values()) if layout.reshard else sum(blocks.values())
    return (stored + outside + inside) * element_bytes


def predict_block_bytes(shape: Shape, layout: Layout) -> float:
    """Return the bytes that autograd saves in one block.

    Values per token, for p ranks of tensor parallelism: each norm saves its input, the normalized tokens and one scale;
    the inputs of the divided matrices are saved once per branch. The heads' queries, keys, values, outputs and softmax
    scales, and the hidden units, are divided by p. If a rank has several heads, their joined outputs are a copy.
    Sequence parallelism also divides the norms by p. Context parallelism saves the keys and values without repeating
    them for grouped queries.
    """
    tokens = shape.count_tokens(layout)
    ranks = layout.tensor
    copies = 3 if shape.heads > ranks else 2  # of the queries and outputs
    keys_values = shape.keys_values_width if layout.context > 1 else 2 * shape.width
    attention = (copies * shape.width + keys_values + shape.heads) / ranks
    hidden = (4 if shape.is_gated else 2) * shape.hidden / ranks
    values = tokens * (2 * count_norm_values(shape, layout) + 2 * shape.width + attention + hidden)
    positions = shape.context / layout.context
    values += 2 * positions * shape.width / shape.heads  # cosines and sines of rotary embedding
    return values * shape.element_bytes + 2 * predict_mask_bytes(shape, layout)


def predict_input_bytes(shape: Shape, layout: Layout) -> float:
    """Return the bytes of the inputs and targets, and of the dropout mask of the token vectors."""
    return 2 * INDEX_BYTES * shape.count_tokens(layout) + predict_mask_bytes(shape, layout)


def predict_output_bytes(shape: Shape, layout: Layout) -> float:
    """Return the bytes that the last norm, the output layer and the loss save."""
    values = count_norm_values(shape, layout) + shape.width + predict_loss_values(shape, layout)
    return shape.count_tokens(layout) * values * shape.element_bytes


def count_norm_values(shape: Shape, layout: Layout) -> float:
    """Return the number of values per token that a norm saves."""
    return (2 * shape.width + 1) / (layout.tensor if layout.sequence else 1)


def predict_mask_bytes(shape: Shape, layout: Layout) -> float:
    """Return the bytes of the mask of one dropout layer."""
    if not shape.dropout:
        return 0
    return shape.count_tokens(layout) * shape.width / (layout.tensor if layout.sequence else 1)


def predict_loss_values(shape: Shape, layout: Layout) -> float:
    """Return the number of values per token that the loss saves."""
    if layout.tensor == 1:
        return shape.vocabulary  # the logarithms of the probabilities
    return 2 * shape.vocabulary / layout.tensor + 1  # logits without their maximum, their exponentials, and the sum


def predict_sent_bytes(parameters: Mapping[str, ParameterSize], shape: Shape, layout: Layout) -> int:
    """Return the bytes that a rank sends in a step with ring algorithms.

    Tensor parallelism: one all-reduce per branch in each direction, one for the token vectors and one for the head;
    three numbers per token for the loss. Context parallelism: the keys and values are sent p - 1 times in each
    direction, and their gradients p times. fully_shard: an all-gather in each direction and a reduce-scatter. Replicas
    and context: an all-reduce of the gradients that a rank stores.
    """
    size = shape.element_bytes
    tokens = shape.count_tokens(layout)
    per_microbatch = 0.0
    if layout.context > 1:
        keys_values = tokens * shape.keys_values_width * size / layout.tensor
        per_microbatch += shape.layers * (3 * layout.context - 2) * keys_values
    if layout.tensor > 1:
        branch = tokens * shape.width * size
        ring = (layout.tensor - 1) / layout.tensor
        per_microbatch += 2 * ring * ((4 * shape.layers + 2) * branch + 3 * tokens * size)
        if layout.sequence:
            per_microbatch += 2 * ring * (2 * shape.layers + 1) * shape.width * size  # gradients of the norms
    stored = size * sum(parameter.count_local(layout) for parameter in parameters.values())
    per_step = 0.0
    if layout.fsdp > 1:
        gathered = sum(parameter.count_local(layout) for name, parameter in parameters.items())
        regathered = sum(p.count_local(layout) for name, p in parameters.items() if name.startswith("block"))
        sent = 2 * gathered + (regathered if layout.reshard else 0)
        per_microbatch += (layout.parameter_shards - 1) * sent * size
        per_microbatch += 2 * (layout.replicas - 1) / layout.replicas * stored
    else:
        copies = layout.replicas * layout.context
        flags = size * len(parameters)  # whether a rank has used each parameter
        per_step += 2 * (copies - 1) / copies * (stored + flags)
    return round(shape.microbatches * per_microbatch + per_step)


def count_flops_per_token(parameters: Mapping[str, ParameterSize], shape: Shape, is_tied: bool) -> int:
    """Return the floating-point operations per token of a forward and a backward pass: 6 N + 12 L T d.

    N is the number of weights in matrix products, which excludes the scales of the norms and the lookup in an untied
    table (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).
    """
    weights = sum(math.prod(size.shape) for size in parameters.values() if len(size.shape) > 1)
    if not is_tied:
        weights -= shape.vocabulary * shape.width
    return 6 * weights + 12 * shape.layers * shape.context * shape.width
