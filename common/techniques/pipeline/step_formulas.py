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
from configs.memory import Memory


def report_step_formulas(memory: Memory, run: Run, pipe: ScheduleExecutor, replicas: World) -> ReportData:
    """Report the formulas of all ranks. All ranks must call this function.

    `replicas` are the ranks that hold the same stages as this rank. There is no formula for recomputed activations.
    """
    sizes: list[int] = []
    for stage in pipe.local_stages.values():
        sizes += [parameter.numel() for parameter in stage.parameters()]
    element_bytes = pipe.dtype.itemsize
    predicted: dict[str, float] = {}
    optimizer_bytes = optimizers.predict_state_bytes(run.training_cfg.optim, sizes, element_bytes)
    if optimizer_bytes is not None:
        predicted[step_formulas.STATE] = 2 * sum(sizes) * element_bytes + optimizer_bytes
    if memory.recompute == "none":
        predicted[step_formulas.ACTIVATIONS] = predict_activation_bytes(run, pipe)
    averaged = sum(sizes) + pipe.has_last_stage  # the gradients and the loss
    sent = count_boundary_values(pipe) + 2 * (replicas.size - 1) / replicas.size * averaged
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

    A microbatch is in flight in a stage from its forward to the end of its backward (B, or W if it is split). A forward
    pass of each stage outside the schedule shows what a microbatch keeps. What the loss keeps is not included.
    """
    by_stage = {}
    for number, stage in pipe.local_stages.items():
        if number:
            shape = (pipe.microbatch_size, *pipe.shapes[number - 1])
            x = torch.zeros(shape, dtype=pipe.dtype, device=pipe.world.device, requires_grad=True)
        else:
            x = run.load_first_inputs(pipe.microbatch_size)
        by_stage[number] = measure_kept_bytes(stage, x)
    kept = 0
    in_flight: Counter[int] = Counter()  # number of microbatches by stage
    for kind, stage, _ in pipe.plan[pipe.world.rank]:
        if kind == "F":
            in_flight[stage] += 1
            kept = max(kept, sum(count * by_stage[number] for number, count in in_flight.items()))
        elif kind in ("B", "W"):
            in_flight[stage] -= 1
    return kept


def measure_kept_bytes(stage: nn.Module, x: Tensor) -> int:
    """Return the bytes that a stage keeps of x [n, ...] for the backward pass. The stage does not change."""
    stage_copy: Any = copy.deepcopy(stage).train()
    with SavedTensors([stage_copy]) as saved:
        output = stage_copy(x)  # keeps what autograd has saved
        size = saved.bytes
        del output
    return size
