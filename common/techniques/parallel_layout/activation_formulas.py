"""Formulas for the activations that a rank keeps, with and without recomputation."""

from __future__ import annotations

from common.techniques.parallel_layout.model_shape import Layers, Shape
from configs.layout import Layout

INDEX_BYTES = 8
"""Size of a token."""


def predict_categories(shape: Shape, layout: Layout) -> dict[str, int]:
    """Return the bytes of kept activations and, if blocks are recomputed, of all activations at their peak.

    The peak is at the end of the forward pass, or when the last block is recomputed. At that time, the output layer and
    the loss have released what they saved.
    """
    kept = predict_activation_bytes(shape, layout)
    if shape.recompute == "none":
        return {"activations": kept}
    growth = max(0, predict_recomputed_bytes(shape, layout) - predict_output_bytes(shape, layout))
    return {"activations": kept, "peak_activations": round(kept + growth)}


def predict_activation_bytes(shape: Shape, layout: Layout, layers: Layers | None = None) -> int:
    """Return the bytes that are kept between the forward and the backward pass of one microbatch.

    `layers` are those of this rank, by default the whole model.
    """
    layers = layers or Layers(shape.layers)
    tokens = shape.count_tokens(layout)
    total = layers.blocks * predict_kept_bytes(shape, layout)
    if layers.has_embedding:
        total += INDEX_BYTES * tokens + predict_mask_bytes(shape, layout)
    if layers.has_head:
        total += INDEX_BYTES * tokens + predict_output_bytes(shape, layout)
    return round(total)


def predict_output_bytes(shape: Shape, layout: Layout) -> float:
    """Return the bytes that the last norm, the output layer and the loss save."""
    values = count_norm_values(shape, layout) + shape.width + predict_loss_values(shape, layout)
    return shape.count_tokens(layout) * values * shape.element_bytes


def predict_kept_bytes(shape: Shape, layout: Layout) -> float:
    """Return the bytes that one block keeps between its forward and its backward pass.

    Values per token, for p ranks of tensor parallelism: a recomputed block keeps its input. Selective recomputation
    also keeps the results of all matrix products, and the outputs and softmax scales of attention. Ring attention is
    recomputed (context).
    """
    if shape.recompute == "none":
        return predict_block_bytes(shape, layout)
    ranks = layout.tensor
    values = shape.width / (ranks if layout.sequence else 1)
    if shape.recompute == "selective":
        values += (shape.width + shape.keys_values_width) / ranks
        values += (2 if shape.is_gated else 1) * shape.hidden / ranks
        values += 2 * shape.width  # sums over the heads and over the hidden units of this rank
        if layout.context == 1:
            values += (shape.width + shape.heads) / ranks
    return values * shape.count_tokens(layout) * shape.element_bytes


def predict_recomputed_bytes(shape: Shape, layout: Layout) -> float:
    """Return the bytes that the recomputation of a block adds to those that the block has kept, or 0 if there is none.

    Afterward, the block has what autograd saves without recomputation. A result that selective recomputation has kept
    is released after its only use, unless autograd saves it. The result of the last matrix product exists longer: the
    last dropout layer is using it or, without dropout, selective recomputation does not need it anymore.
    """
    if shape.recompute == "none":
        return 0
    last_product = 0.0
    if shape.dropout:
        last_product = shape.width / (layout.tensor if layout.sequence else 1)
    elif shape.recompute == "selective":
        last_product = shape.width
    last_product *= shape.count_tokens(layout) * shape.element_bytes
    return predict_block_bytes(shape, layout) + last_product - predict_kept_bytes(shape, layout)


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
