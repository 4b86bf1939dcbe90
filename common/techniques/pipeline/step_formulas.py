"""Formulas for the training state, the activations and the messages of a rank of a pipeline."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from common.ranks.rendezvous import World
from common.runs.result import ReportData
from common.techniques.pipeline.executor import ScheduleExecutor
from common.training import optimizers, step_formulas
from common.training.run import Run
from common.training.saved_tensors import SavedTensors
from configs.memory import Memory, StateSharding


def report_step_formulas(
    memory: Memory, sharding: StateSharding, run: Run, pipe: ScheduleExecutor, replicas: World
) -> ReportData:
    """Report the formulas of all ranks. All ranks must call this function.

    `replicas` are the ranks that hold the same stages as this rank. With zero1, an all-gather among them follows the
    update, in which each rank sends as many values as the rank that updates most. There is no formula for recomputed
    activations.
    """
    parameters: list[nn.Parameter] = []
    for stage in pipe.local_stages.values():
        parameters += stage.parameters()
    is_frozen = not all(parameter.requires_grad for parameter in parameters)
    if any(run.world.all_gather(is_frozen)):
        return ReportData()  # frozen parameters have no gradients
    sizes = [parameter.numel() for parameter in parameters]
    element_bytes = pipe.dtype.itemsize
    predicted: dict[str, float] = {}
    updated = [sizes] * replicas.size
    if sharding.zero1:
        from common.techniques.sharded_optimizer.api import divide_sizes  # imported here because few runs use it

        updated = divide_sizes(sizes, replicas.size)
    optimizer_bytes = optimizers.predict_state_bytes(run.training_cfg.optim, updated[replicas.rank], element_bytes)
    if optimizer_bytes is not None:
        predicted[step_formulas.STATE] = 2 * sum(sizes) * element_bytes + optimizer_bytes
    if memory.recompute == "none":
        predicted[step_formulas.ACTIVATIONS] = predict_activation_bytes(run, pipe)
    loss_values = 1 if pipe.has_last_stage else 0
    averaged = sum(sizes) + loss_values
    sent = count_boundary_values(pipe) + 2 * (replicas.size - 1) / replicas.size * averaged
    if sharding.zero1:
        sent += (replicas.size - 1) * max(map(sum, updated))
    predicted[step_formulas.SENT] = round(sent * element_bytes)
    return step_formulas.gather_formulas(predicted, run.world)


def count_boundary_values(pipe: ScheduleExecutor) -> int:
    """Return the number of values that this rank sends to other ranks of its pipeline in a step.

    For each microbatch, a stage sends its output to the next stage, and the gradient of its input to the previous one.
    """
    values = 0
    for stage in pipe.local_stages:
        for neighbor in (stage - 1, stage + 1):
            if 0 <= neighbor < pipe.stage_count and pipe.stage_ranks[neighbor] != pipe.world.rank:
                values += pipe.shapes[min(stage, neighbor)].numel()
    return values * pipe.microbatches * pipe.microbatch_size


def predict_activation_bytes(run: Run, pipe: ScheduleExecutor) -> int:
    """Return the bytes of the activations of all microbatches in flight, when they need most memory.

    A microbatch is in flight in a stage from its forward (F) to the end of its backward: B, or I and W if it is split.
    """
    kept_bytes = measure_kept_bytes(run, pipe)
    peak = 0
    in_flight: Counter[tuple[str, int]] = Counter()  # number of microbatches by their latest action and the stage
    for kind, number, _ in pipe.plan[pipe.world.rank]:
        if kind in ("F", "I"):
            in_flight[kind, number] += 1
        if kind in ("B", "I"):
            in_flight["F", number] -= 1
        if kind == "W":
            in_flight["I", number] -= 1
        peak = max(peak, sum(count * kept_bytes[key] for key, count in in_flight.items()))
    return peak


def measure_kept_bytes(run: Run, pipe: ScheduleExecutor) -> dict[tuple[str, int], int]:
    """Return the bytes that a microbatch keeps after its F or I in each stage of this rank.

    The passes of one microbatch through copies of the stages are measured, without the loss. If the rank also holds the
    previous stage, an activation that both stages keep counts for the previous stage only.
    """
    stages: dict[int, Any] = {number: copy.deepcopy(stage).train() for number, stage in pipe.local_stages.items()}
    split_stages = {number for kind, number, _ in pipe.plan[pipe.world.rank] if kind == "I"}
    kept_bytes: dict[tuple[str, int], int] = {}
    passes: dict[int, tuple[Tensor, Tensor]] = {}  # input and output, which keeps what autograd has saved
    with SavedTensors(list(stages.values())) as saved:
        for number in sorted(stages):
            if number - 1 in passes:
                x = passes[number - 1][1].detach()
            elif number:
                shape = (pipe.microbatch_size, *pipe.shapes[number - 1])
                x = torch.zeros(shape, dtype=pipe.dtype, device=pipe.world.device)
            else:
                x = run.load_first_inputs(pipe.microbatch_size)
            x.requires_grad_(x.is_floating_point() and (number > 0 or number in split_stages))
            size = saved.bytes
            passes[number] = x, stages[number](x)
            kept_bytes["F", number] = saved.bytes - size
        remaining = []
        for number in sorted(split_stages & stages.keys(), reverse=True):
            from common.techniques.pipeline.split_backward import compute_input_gradient  # only few schedules split

            size = saved.bytes
            x, output = passes.pop(number)
            remaining.append(compute_input_gradient(x, output, torch.ones_like(output), is_wanted=number > 0))
            del output
            kept_bytes["I", number] = kept_bytes["F", number] - (size - saved.bytes)
    return kept_bytes
