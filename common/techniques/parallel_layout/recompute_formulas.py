"""Formulas for the activations and messages of a GPT whose blocks recompute their activations.

`recompute` is the setting: none, blocks or selective. Sharded parameters (fsdp) send nothing more: they are gathered
for the backward pass of a block anyway, and its recomputation uses them.
"""

from __future__ import annotations

from common.techniques.parallel_layout.layout_formulas import (
    Shape,
    predict_block_bytes,
    predict_input_bytes,
    predict_output_bytes,
)
from configs.layout import Layout


def predict_activation_bytes(shape: Shape, layout: Layout, recompute: str) -> int:
    """Return the bytes that are kept between the forward and the backward pass of one microbatch."""
    blocks = shape.layers * predict_kept_bytes(shape, layout, recompute)
    return round(blocks + predict_input_bytes(shape, layout) + predict_output_bytes(shape, layout))


def predict_peak_activation_bytes(shape: Shape, layout: Layout, recompute: str) -> int:
    """Return the largest number of bytes of activations, including those that a block has recomputed.

    It is reached at the end of the forward pass, or when the last block is recomputed. At that time, the output layer
    and the loss have released what they saved.
    """
    recomputed = predict_recomputed_bytes(shape, layout, recompute) if recompute != "none" else 0
    growth = max(0, recomputed - predict_output_bytes(shape, layout))
    return round(predict_activation_bytes(shape, layout, recompute) + growth)


def predict_kept_bytes(shape: Shape, layout: Layout, recompute: str) -> float:
    """Return the bytes that one block keeps between its forward and its backward pass.

    Values per token, for p ranks of tensor parallelism: a recomputed block keeps its input. Selective recomputation
    also keeps the results of all matrix products, and the outputs and softmax scales of attention. Ring attention is
    recomputed (context).
    """
    if recompute == "none":
        return predict_block_bytes(shape, layout)
    ranks = layout.tensor
    values = shape.width / (ranks if layout.sequence else 1)
    if recompute == "selective":
        values += (shape.width + shape.keys_values_width) / ranks
        values += (2 if shape.is_gated else 1) * shape.hidden / ranks
        values += 2 * shape.width  # sums over the heads and over the hidden units of this rank
        if layout.context == 1:
            values += (shape.width + shape.heads) / ranks
    return values * shape.count_tokens(layout) * shape.element_bytes


def predict_recomputed_bytes(shape: Shape, layout: Layout, recompute: str) -> float:
    """Return the bytes that the recomputation of a block adds to those that the block has kept.

    Afterward, the block has what autograd saves without recomputation. A result that selective recomputation has kept
    is released after its only use, unless autograd saves it. The result of the last matrix product exists longer: the
    last dropout layer is using it or, without dropout, selective recomputation does not need it anymore.
    """
    last_product = 0.0
    if shape.dropout:
        last_product = shape.width / (layout.tensor if layout.sequence else 1)
    elif recompute == "selective":
        last_product = shape.width
    last_product *= shape.count_tokens(layout) * shape.element_bytes
    return predict_block_bytes(shape, layout) + last_product - predict_kept_bytes(shape, layout, recompute)


def predict_repeated_messages(shape: Shape, layout: Layout, recompute: str) -> int:
    """Return the bytes that a rank sends in a step because blocks are recomputed.

    The recomputation of a block ends after the last activation that autograd saves, which is the mask of the last
    dropout layer or, without dropout, the input of the last matrix. It repeats the collectives of tensor parallelism up
    to this point. Context parallelism sends the keys and values around the ring again.
    """
    if recompute == "none":
        return 0
    tokens = shape.count_tokens(layout)
    size = shape.element_bytes
    ring = (layout.tensor - 1) / layout.tensor
    branch = ring * tokens * shape.width * size
    finished_branches = 2 if shape.dropout else 1
    per_block = 2 * finished_branches * branch
    if layout.sequence:
        per_block = (2 + finished_branches) * branch
    per_block += (layout.context - 1) * tokens * shape.keys_values_width * size / layout.tensor
    return round(shape.microbatches * shape.layers * per_block)
