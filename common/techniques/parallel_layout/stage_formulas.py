"""Formulas for the memory and the messages of a rank that holds stages of a GPT."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.techniques.parallel_layout.activation_formulas import (
    predict_activation_bytes,
    predict_loss_values,
    predict_output_bytes,
    predict_recomputed_bytes,
)
from common.techniques.parallel_layout.gradient_formulas import GradientSizes
from common.techniques.parallel_layout.layout_formulas import (
    predict_layer_messages,
    predict_peak_parameter_bytes,
    predict_state_bytes,
    predict_update_messages,
)
from common.techniques.parallel_layout.model_shape import TABLE, Layers, ParameterSize, Shape
from common.techniques.pipeline.api import Action
from configs.layout import Layout


@dataclass(frozen=True)
class RankStages:
    """The stages of one rank, and what it does with them in a step."""

    layers: Mapping[int, Layers]
    """Layers of each stage, by its number."""
    actions: Sequence[Action]
    """Actions of the rank in their order."""
    boundary_messages: int
    """Number of activations and gradients that the rank sends to other ranks, for each microbatch."""
    copied: Mapping[str, ParameterSize]
    """The copy of a tied table, which has a gradient but no optimizer state; empty on all other ranks."""
    sends_table: bool
    """True if the rank sends the values of a tied table, or the gradient of its copy, in each step."""


def predict_bytes(
    parameters: Mapping[str, ParameterSize], shape: Shape, layout: Layout, stages: RankStages
) -> dict[str, int]:
    """Return the bytes of a rank by category, and the bytes that it sends in a step."""
    with_copies = {**parameters, **stages.copied}
    predicted = predict_state_bytes(with_copies, layout, shape.element_bytes)
    predicted["optimizer"] = predict_state_bytes(parameters, layout, shape.element_bytes)["optimizer"]
    predicted["peak_parameters"] = predict_peak_parameter_bytes(with_copies, layout, shape.element_bytes)
    predicted["peak_gradients"] = predicted["gradients"]
    if layout.fsdp > 1:
        gradients = GradientSizes.count(parameters, layout, stages.copied)
        backwards = [action.stage for action in stages.actions if action.kind == "B"]
        peak = gradients.predict_stages(stages.layers, backwards, shape.microbatches)
        predicted["peak_gradients"] = shape.element_bytes * peak
    predicted |= predict_activations_in_flight(shape, layout, stages)
    predicted["sent"] = predict_sent_bytes(parameters, shape, layout, stages)
    return predicted


def predict_activations_in_flight(shape: Shape, layout: Layout, stages: RankStages) -> dict[str, int]:
    """Return the bytes of the activations of all microbatches in flight, when they need most memory.

    `activations` are kept between passes. `peak_activations`, which exists only if blocks are recomputed, includes the
    activations that a block has computed again. A microbatch is in flight in a stage from its forward to the end of its
    backward. If a backward is split, I frees what the loss has saved, and W frees the rest. The output layer and the
    loss release what they saved before the last block is recomputed.
    """
    loss_bytes = round(shape.count_tokens(layout) * predict_loss_values(shape, layout) * shape.element_bytes)
    output_bytes = round(predict_output_bytes(shape, layout))
    in_flight: Counter[tuple[int, int]] = Counter()  # bytes by stage and microbatch
    largest_kept = 0
    largest_recomputed = 0
    for kind, stage, microbatch in stages.actions:
        layers = stages.layers[stage]
        if kind == "F":
            in_flight[stage, microbatch] = predict_activation_bytes(shape, layout, layers)
            largest_kept = max(largest_kept, in_flight.total())
        elif kind == "I":
            in_flight[stage, microbatch] -= loss_bytes if layers.has_head else 0
        else:
            released = output_bytes if layers.has_head else 0
            recomputed = round(predict_recomputed_bytes(shape, layout))
            largest_recomputed = max(largest_recomputed, in_flight.total() - released + recomputed)
            del in_flight[stage, microbatch]
    if shape.recompute == "none":
        return {"activations": largest_kept}
    return {"activations": largest_kept, "peak_activations": max(largest_kept, largest_recomputed)}


def predict_sent_bytes(
    parameters: Mapping[str, ParameterSize], shape: Shape, layout: Layout, stages: RankStages
) -> int:
    """Return the bytes that a rank sends in a step with ring algorithms.

    Activations and gradients between stages are sent for each microbatch. fully_shard reduces gradients once per step.
    It gathers parameters for each microbatch, in each direction with `reshard`, and otherwise once per step. A tied
    table is sent once per step, and so is the gradient of its copy. With zero1, the updated parameters are sent, too.
    """
    size = shape.element_bytes
    boundary = shape.count_tokens(layout) * shape.width * size / (layout.tensor if layout.sequence else 1)
    per_microbatch = stages.boundary_messages * boundary
    for layers in stages.layers.values():
        per_microbatch += predict_layer_messages(shape, layout, layers)

    stored = size * sum(parameter.count_local(layout) for parameter in parameters.values())
    gathered = {**parameters, **stages.copied}
    all_reduce = 2 * (layout.copies - 1) / layout.copies
    per_step = size * gathered[TABLE].count_local(layout) if stages.sends_table else 0.0
    if layout.fsdp > 1:
        shards = size * sum(parameter.count_local(layout) for parameter in gathered.values())
        blocks = size * sum(p.count_local(layout) for name, p in gathered.items() if name.startswith("block"))
        others = layout.parameter_shards - 1
        per_step += others * shards  # reduce-scatter
        if layout.reshard:
            per_microbatch += others * (shards + blocks)
        else:
            per_step += others * shards
        per_step += all_reduce * shards
    else:
        flags = size * len(parameters)  # whether a rank has used each parameter
        per_step += all_reduce * (stored + flags)
    per_step += predict_update_messages(parameters, layout, size)
    return round(shape.microbatches * per_microbatch + per_step)
