"""Measurement of one training step: memory of a rank by category, and bytes that it sends (`log.memory`)."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from common.checkpoint.local_part import LocalPart
from common.measure.metrics_log import Values
from common.ranks.rendezvous import World
from common.runs.result import ReportData
from common.training.hooks import StepHook
from common.training.message_counter import MessageCounter
from common.training.observing_mode import ObservingMode
from common.training.saved_tensors import SavedTensors

GATHER_OPERATION = "fsdp::split_with_sizes_copy"
"""Operation of `fully_shard` that copies the result of an all-gather to the gathered parameters."""
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
            local_state += list_tensors(part_state.state_dict())
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


def free_gathered_parameters(model: nn.Module) -> None:
    """Free the parameters that an evaluation has left gathered, so that the next step gathers them like later steps."""
    for module in model.modules():
        reshard: Any = getattr(module, "reshard", None)  # added by fully_shard
        if reshard is not None:
            reshard()


def list_tensors(state: Any) -> list[Tensor]:
    """Return the tensors in nested dicts."""
    if isinstance(state, Mapping):
        tensors: list[Tensor] = []
        for value in state.values():
            tensors += list_tensors(value)
        return tensors
    return [state] if isinstance(state, Tensor) else []


def count_bytes(values: Iterable[Any]) -> int:
    """Return the size of this rank's parts of all tensors among `values`."""
    total = 0
    for value in values:
        local = value.to_local() if hasattr(value, "to_local") else value
        if isinstance(local, Tensor):
            total += local.numel() * local.element_size()
    return total


class GatheredParameters(ObservingMode):
    """Context in which the memory of the parameters that `fully_shard` gathers is observed.

    `fully_shard` frees a parameter by resizing its storage to 0. The buffers in which the shards of all ranks arrive
    are not counted, because the thread that receives them frees them at any time after their use. Parameters that are
    divided in a dimension other than 0 are copied once more; this copy is not observed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.storages: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name() == GATHER_OPERATION and kwargs:
            self.storages.update(parameter.untyped_storage() for parameter in kwargs["out"])
            # The memory only grows in this operation, so the peak is after one of them.
            self.peak_bytes = max(self.peak_bytes, sum(storage.nbytes() for storage in self.storages))
        return result


class UndividedGradients:
    """Context in which the memory of gradients is observed while `fully_shard` has not divided all of them.

    The gradients of gathered parameters exist until they are reduced. With `set_requires_gradient_sync(False)`, they
    are added over several backward passes.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.parts = parts
        self.sizes: dict[nn.Parameter, int] = {}
        """Size in bytes of the gradient of each parameter on this rank, both of stored and of gathered parameters."""
        self.peak_bytes = 0
        """Largest size of all gradients, or 0 if no parameter was gathered."""
        self.contexts = contextlib.ExitStack()

    def __enter__(self) -> UndividedGradients:
        for part in self.parts:
            for parameter in part.parameters():
                self.sizes[parameter] = count_bytes([parameter])
            for module in part.modules():
                if hasattr(module, "unshard"):  # added by fully_shard, whose own hook gathers the parameters before
                    self.contexts.callback(module.register_forward_pre_hook(self._observe_gathered).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self.contexts.close()

    def _observe_gathered(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        for parameter in module.parameters():
            if parameter not in self.sizes:
                self.sizes[parameter] = count_bytes([parameter])
                self.contexts.callback(parameter.register_post_accumulate_grad_hook(self._update_peak).remove)

    def _update_peak(self, parameter: Tensor) -> None:
        size = sum(size for parameter, size in self.sizes.items() if parameter.grad is not None)
        self.peak_bytes = max(self.peak_bytes, size)
