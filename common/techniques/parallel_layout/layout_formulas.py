"""Formulas for the memory, messages and floating-point operations of a GPT under a layout.

The formulas need only sizes, so they can be evaluated before a run. Tests compare them with measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from common.techniques.parallel_layout import activation_formulas
from common.techniques.parallel_layout.gradient_formulas import GradientSizes
from common.techniques.parallel_layout.model_shape import TABLE, Layers, ParameterSize, Shape
from common.techniques.sharded_optimizer.api import assign_to_ranks
from configs.layout import Layout

ADAM_STATES = 2
"""Number of tensors of the size of a parameter in the state of Adam and AdamW."""
STEP_BYTES = 4
"""Size of the number of steps that Adam stores for each parameter."""


def predict_bytes(parameters: Mapping[str, ParameterSize], shape: Shape, layout: Layout) -> dict[str, int]:
    """Return the bytes of a rank by category, and the bytes that it sends in a step, for a model without stages."""
    predicted = predict_state_bytes(parameters, layout, shape.element_bytes)
    predicted["peak_parameters"] = predict_peak_parameter_bytes(parameters, layout, shape.element_bytes)
    predicted["peak_gradients"] = predicted["gradients"]
    if layout.fsdp > 1:
        gradients = GradientSizes.count(parameters, layout)
        peak = gradients.predict_pass(Layers(shape.layers), is_first=shape.microbatches == 1)
        predicted["peak_gradients"] = shape.element_bytes * peak
    predicted |= activation_formulas.predict_categories(shape, layout)
    predicted["sent"] = predict_sent_bytes(parameters, shape, layout)
    return predicted


def predict_state_bytes(parameters: Mapping[str, ParameterSize], layout: Layout, element_bytes: int) -> dict[str, int]:
    """Return the bytes of parameters, gradients and AdamW's state on the first rank.

    If the optimizer state is divided (zero1), its largest part on any rank is returned.
    """
    stored = element_bytes * sum(size.count_local(layout) for size in parameters.values())
    parts = []
    for sizes in list_updated_sizes(parameters, layout):
        parts.append(ADAM_STATES * element_bytes * sum(sizes) + STEP_BYTES * len(sizes))
    return {"parameters": stored, "gradients": stored, "optimizer": max(parts)}


def list_updated_sizes(parameters: Mapping[str, ParameterSize], layout: Layout) -> list[list[int]]:
    """Return the local sizes of the parameters that each of the ranks with the same parameters updates.

    Without zero1, every rank updates all parameters, and only the first rank is listed.
    """
    ranks = layout.copies if layout.zero1 else 1
    owners = assign_to_ranks([math.prod(size.shape) for size in parameters.values()], ranks)
    updated: list[list[int]] = [[] for _ in range(ranks)]
    for size, owner in zip(parameters.values(), owners, strict=True):
        updated[owner].append(size.count_local(layout))
    return updated


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


def predict_layer_messages(shape: Shape, layout: Layout, layers: Layers) -> float:
    """Return the bytes that a rank sends within its layers for one microbatch.

    Tensor parallelism: one all-reduce per branch in each direction, one for the token vectors and one for the head;
    three numbers per token for the loss. Context parallelism: the keys and values are sent p - 1 times in each
    direction, and their gradients p times. A recomputed block ends after the last activation that autograd saves: the
    mask of the last dropout layer or, without dropout, the input of the last matrix. It repeats the collectives up to
    this point, and sends the keys and values around the ring again.
    """
    size = shape.element_bytes
    tokens = shape.count_tokens(layout)
    sent = 0.0
    if layout.context > 1:
        keys_values = tokens * shape.keys_values_width * size / layout.tensor
        sent += layers.blocks * (3 * layout.context - 2) * keys_values
    if layout.tensor > 1:
        branch = tokens * shape.width * size
        ring = (layout.tensor - 1) / layout.tensor
        branches = 4 * layers.blocks + layers.has_embedding + layers.has_head
        sent += 2 * ring * (branches * branch + 3 * layers.has_head * tokens * size)
        if layout.sequence:
            norms = 2 * layers.blocks + layers.has_head
            sent += 2 * ring * norms * shape.width * size  # gradients of the norms
    if shape.recompute != "none":
        sent += layers.blocks * predict_repeated_messages(shape, layout)
    return sent


def predict_repeated_messages(shape: Shape, layout: Layout) -> float:
    """Return the bytes that a rank sends because a block is recomputed."""
    tokens = shape.count_tokens(layout)
    ring = (layout.tensor - 1) / layout.tensor
    branch = ring * tokens * shape.width
    finished_branches = 2 if shape.dropout else 1
    values = (2 + finished_branches) * branch if layout.sequence else 2 * finished_branches * branch
    values += (layout.context - 1) * tokens * shape.keys_values_width / layout.tensor
    return values * shape.element_bytes


def predict_sent_bytes(parameters: Mapping[str, ParameterSize], shape: Shape, layout: Layout) -> int:
    """Return the bytes that a rank sends in a step with ring algorithms.

    fully_shard: an all-gather in each direction and a reduce-scatter. Replicas and context: an all-reduce of the
    gradients that a rank stores.
    """
    size = shape.element_bytes
    per_microbatch = predict_layer_messages(shape, layout, Layers(shape.layers))
    stored = size * sum(parameter.count_local(layout) for parameter in parameters.values())
    per_step = 0.0
    if layout.fsdp > 1:
        gathered = sum(parameter.count_local(layout) for name, parameter in parameters.items())
        regathered = sum(p.count_local(layout) for name, p in parameters.items() if name.startswith("block"))
        sent = 2 * gathered + (regathered if layout.reshard else 0)
        per_microbatch += (layout.parameter_shards - 1) * sent * size
        per_microbatch += 2 * (layout.replicas - 1) / layout.replicas * stored
    else:
        flags = size * len(parameters)  # whether a rank has used each parameter
        per_step += 2 * (layout.copies - 1) / layout.copies * (stored + flags)
    per_step += predict_update_messages(parameters, layout, size)
    return round(shape.microbatches * per_microbatch + per_step)


def predict_update_messages(parameters: Mapping[str, ParameterSize], layout: Layout, element_bytes: int) -> int:
    """Return the bytes that a rank sends in the all-gather of updated parameters (zero1).

    Each rank sends as many values as the rank that updates most.
    """
    if not layout.zero1:
        return 0
    largest = max(sum(sizes) for sizes in list_updated_sizes(parameters, layout))
    return (layout.copies - 1) * largest * element_bytes


def count_flops_per_token(parameters: Mapping[str, ParameterSize], shape: Shape, is_tied: bool) -> int:
    """Return the floating-point operations per token of a forward and a backward pass: 6 N + 12 L T d.

    N is the number of weights in matrix products, which excludes the scales of the norms and the lookup in an untied
    table (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).
    """
    weights = sum(math.prod(size.shape) for size in parameters.values() if len(size.shape) > 1)
    if not is_tied and TABLE in parameters:
        weights -= shape.vocabulary * shape.width
    return 6 * weights + 12 * shape.layers * shape.context * shape.width
