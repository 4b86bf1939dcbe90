"""Measurement of one training step: memory of a rank by category, and bytes that it sends (`log.memory`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from common.checkpoint.local_part import LocalPart
from common.measure.metrics_log import Values
from common.ranks.rendezvous import World
from common.runs.result import ReportData
from common.training.gathered_parameters import GatheredParameters, UndividedGradients, free_gathered_parameters
from common.training.hooks import StepHook
from common.training.message_counter import MessageCounter
from common.training.saved_tensors import SavedTensors
from common.training.tensor_sizes import count_bytes, list_tensors

PEAK = "peak_"
"""Start of the names of categories that contain the largest size at any time of the step."""


class StepMeter(StepHook):
    """Hook that measures one step of an attempt.

    All numbers are bytes of this rank. `sent_bytes` is the number of bytes that ring algorithms send for the
    collectives of the step (see `message_counter`), and the size of all messages to single ranks. `activations` is the
    largest size of the storages that are kept for backward passes at any time of the step, without parameters. Of the
    batches of the data loader, which share a storage, only the part of the step is counted. `peak_activations` is
    measured if blocks recompute their activations, which it includes.
    `peak_parameters` is the size of this rank's parameters and of all gathered parameters, when it is largest.
    `peak_gradients` is the size of this rank's gradients and of all gradients of gathered parameters, when it is
    largest.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        optimizer: Optimizer,
        *,
        step: int = 1,
        count_remaining: Callable[[], int] | None = None,
        further_message_bytes: int = 0,
        local_parts: Mapping[str, LocalPart] | None = None,
    ) -> None:
        """Prepare the measurement of the parts of the model that this rank trains.

        `step` is the number of the measured step, counted from 1 in each attempt. `count_remaining` returns how many
        steps remain, and is called before the first one. If fewer than `step` remain, the last one is measured.
        `further_message_bytes` is the number of bytes that this rank sends in each step outside torch.distributed.
        `local_parts` contains further state of this rank by name.
        """
        self.parts = parts
        self.optimizer = optimizer
        self.steps_to_wait = step - 1
        self.count_remaining = count_remaining
        self.further_message_bytes = further_message_bytes
        self.local_parts = local_parts or {}
        self.formulas: dict[str, int] = {}
        """Bytes by category and `sent`, from formulas."""
        self.is_done = False
        self.contexts = contextlib.ExitStack()
        self.messages = MessageCounter()
        self.gathered_parameters = GatheredParameters()
        self.undivided_gradients = UndividedGradients(parts)
        self.saved_tensors = SavedTensors(parts)
        self.memory: dict[str, int] = {}
        """Bytes by category: parameters, peak_parameters, gradients, peak_gradients, optimizer, local, activations,
        peak_activations (only if blocks recompute their activations), buffers."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sent in the measured step."""
        return round(self.messages.sent_bytes) + self.further_message_bytes if self.is_done else 0

    @property
    def state_bytes(self) -> int:
        """Bytes of the training state: parameters and gradients at their peaks, optimizer and local state."""
        return sum(self.memory.get(name, 0) for name in ("peak_parameters", "peak_gradients", "optimizer", "local"))

    def on_start(self) -> None:
        if self.count_remaining is not None:
            self.steps_to_wait = max(0, min(self.steps_to_wait, self.count_remaining() - 1))

    def before_step(self) -> None:
        """Start to observe the measured step, or start again if the step is repeated."""
        if self.is_done or self.steps_to_wait:
            return
        self.contexts.close()
        for part in self.parts:
            free_gathered_parameters(part)
        self.messages = MessageCounter()
        self.gathered_parameters = GatheredParameters()
        self.undivided_gradients = UndividedGradients(self.parts)
        self.saved_tensors = SavedTensors(self.parts)
        for context in (self.messages, self.gathered_parameters, self.undivided_gradients, self.saved_tensors):
            self.contexts.enter_context(context)

    def collect_values(self) -> Values:
        """Measure the memory at the end of the measured step. The gradients still exist."""
        if self.steps_to_wait:
            self.steps_to_wait -= 1
        elif not self.is_done:
            self.is_done = True
            self.contexts.close()
            self.memory = self._measure_memory()
        return {}

    def on_end(self) -> None:
        self.contexts.close()

    def add_formulas(self, formulas: Mapping[str, int]) -> None:
        """Show the values of formulas, by category and `sent`, beside the measured bytes."""
        self.formulas.update(formulas)

    def gather_report(self, world: World) -> ReportData:
        """Report the memory and the sent bytes of each rank, or nothing if the attempt had no step."""
        activation_bytes = self.memory.get("peak_activations", self.memory.get("activations", 0))
        ranks = world.gather([self.state_bytes, activation_bytes, self.sent_bytes])
        memory = world.gather(self.memory)
        if not ranks or not self.is_done:
            return ReportData()
        state, activations, sent = (list(values) for values in zip(*ranks, strict=True))
        largest: dict[str, int] = {}
        for sizes in memory:  # ranks may have different categories; a rank that joined at the end has none
            for name, size in sizes.items():
                largest[name] = max(size, largest.get(name, 0))
        largest["sent"] = max(sent)
        row = format_sizes(largest, self.formulas)
        measured = {"rank_state_bytes": state, "rank_activation_bytes": activations, "rank_sent_bytes": sent}
        return ReportData({"memory and messages": row}, measured=measured)

    def _measure_memory(self) -> dict[str, int]:
        parameters: list[Tensor] = []
        buffers: list[Tensor] = []
        for part in self.parts:
            parameters += part.parameters()
            buffers += part.buffers()
        state: list[Any] = []
        for values in self.optimizer.state.values():
            state += values.values()
        local_state: list[Tensor] = []
        for part_state in self.local_parts.values():
            tensors = list_tensors(part_state.state_dict())
            # Integers are random states, which do not grow with the model.
            local_state += [tensor for tensor in tensors if tensor.is_floating_point()]
        stored = count_bytes(parameters)
        gradients = count_bytes(parameter.grad for parameter in parameters)
        memory = {
            "parameters": stored,
            "peak_parameters": stored + self.gathered_parameters.peak_bytes,
            "gradients": gradients,
            "peak_gradients": max(gradients, self.undivided_gradients.peak_bytes),
            "optimizer": count_bytes(state),
            "local": count_bytes(local_state),
            "activations": self.saved_tensors.peak_bytes,
        }
        if self.saved_tensors.has_recomputed:
            memory["peak_activations"] = self.saved_tensors.peak_recomputed_bytes
        return memory | {"buffers": count_bytes(buffers)}


def format_sizes(sizes: Mapping[str, int], formulas: Mapping[str, int]) -> str:
    """Return a line for each size, without empty categories and peaks that are not higher than the usual size."""
    lines = []
    for name, size in sizes.items():
        is_repeated = name.startswith(PEAK) and size == sizes[name.removeprefix(PEAK)]
        if (size or formulas.get(name)) and not is_repeated:
            formula = f" (formula: {formulas[name] / 1e6:.3f})" if name in formulas else ""
            lines.append(f"{name.replace('_', ' ')}: {size / 1e6:.3f} MB{formula}")
    return "\n".join(lines)
