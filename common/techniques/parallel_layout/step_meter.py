"""Measurement of one training step: memory of a rank by category, and bytes that it sends."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from common.measure.metrics_log import Values
from common.techniques.recompute.api import is_kept, observe_blocks
from common.training.hooks import StepHook

COLLECTIVE_NAMESPACE = "c10d"
GATHER_OPERATION = "fsdp::split_with_sizes_copy"
"""Operation of `fully_shard` that copies the result of an all-gather to the gathered parameters."""
BYTES_SENT = {"allreduce_": 2.0, "_allgather_base_": 1.0, "allgather_": 1.0, "_reduce_scatter_base_": 1.0}
"""Bytes that a rank sends, as a multiple of (p - 1) / p times the size of the full tensor."""
SEND = "send"
"""Name of the operation that sends a tensor to one rank."""
RECEIVE = "recv_"
"""Start of the names of operations that receive a tensor from one rank."""


class StepMeter(StepHook):
    """Hook that measures the first step of an attempt.

    All numbers are bytes of this rank. `sent_bytes` is the number of bytes that ring algorithms send (Patarasuk and
    Yuan 2009) for the collectives of the step, and the size of all messages to single ranks. `activations` is the size
    of the storages that are kept for the backward pass of one microbatch, without parameters. Of tokens, which share a
    storage with later batches, only those of the microbatch are counted. `peak_activations` is measured if blocks
    recompute their activations: it is the largest size at the end of a forward pass or of a recomputation.
    `peak_parameters` is the size of this rank's parameters and of all gathered parameters, when it is largest.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.is_done = False
        self.contexts = contextlib.ExitStack()
        self.collectives = CollectiveCounter()
        self.gathered_parameters = GatheredParameters()
        self.saved_tensors = SavedTensors(model)
        self.memory: dict[str, int] = {}
        """Bytes by category: parameters, peak_parameters, gradients, optimizer, activations, peak_activations (only if
        blocks recompute their activations), buffers."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sent in the measured step."""
        return round(self.collectives.sent_bytes)

    def before_step(self) -> None:
        """Start to observe the first step."""
        if not self.is_done:
            free_gathered_parameters(self.model)
            self.contexts.enter_context(self.collectives)
            self.contexts.enter_context(self.gathered_parameters)
            self.contexts.enter_context(self.saved_tensors.hooks)
            self.saved_tensors.start()
            self.contexts.enter_context(observe_blocks(self.model, self.saved_tensors))

    def collect_values(self) -> Values:
        """Measure the memory at the end of the first step. The gradients still exist."""
        if not self.is_done:
            self.is_done = True
            self.contexts.close()
            self.memory = self._measure_memory()
        return {}

    def on_end(self) -> None:
        self.contexts.close()

    def _measure_memory(self) -> dict[str, int]:
        parameters = list(self.model.parameters())
        state: list[Any] = []
        for values in self.optimizer.state.values():
            state += values.values()
        stored = count_bytes(parameters)
        memory = {
            "parameters": stored,
            "peak_parameters": stored + self.gathered_parameters.peak_bytes,
            "gradients": count_bytes(parameter.grad for parameter in parameters),
            "optimizer": count_bytes(state),
            "activations": self.saved_tensors.kept_bytes,
        }
        if self.saved_tensors.has_recomputed:
            memory["peak_activations"] = self.saved_tensors.peak_bytes
        return memory | {"buffers": count_bytes(self.model.buffers())}


def free_gathered_parameters(model: nn.Module) -> None:
    """Free the parameters that an evaluation has left gathered, so that the next step gathers them like later steps."""
    for module in model.modules():
        reshard: Any = getattr(module, "reshard", None)  # added by fully_shard
        if reshard is not None:
            reshard()


def count_bytes(values: Iterable[Any]) -> int:
    """Return the size of this rank's parts of all tensors among `values`."""
    total = 0
    for value in values:
        local = value.to_local() if hasattr(value, "to_local") else value
        if isinstance(local, Tensor):
            total += local.numel() * local.element_size()
    return total


class SavedTensors:
    """The storages that are kept for the backward pass of the first microbatch of a step.

    Autograd saves most of them. Others are the results that selective recomputation keeps, and the activations that a
    block has recomputed. The data loader keeps several batches of tokens in one storage. Tokens are therefore counted
    by their own size.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.hooks = saved_tensors_hooks(self.record, self._start_backward)
        self.storages: weakref.WeakSet[Any] = weakref.WeakSet()
        """The storages that still exist."""
        self.token_bytes: dict[int, int] = {}
        """Size of each tensor of tokens, by its address."""
        self.kept_bytes = 0
        """Size of all storages at the end of the forward pass."""
        self.peak_bytes = 0
        """Largest size of all storages, at the end of the forward pass or of the recomputation of a block."""
        self.has_recomputed = False
        self.has_ended = False
        self.registration: RemovableHandle | None = None
        self.is_recording = False

    def start(self) -> None:
        """Record the saved tensors from the next forward pass of the model."""
        self.registration = self.model.register_forward_pre_hook(self._start_microbatch)

    def _start_microbatch(self, model: nn.Module, inputs: Any) -> None:
        """Record from the first forward pass until the second one."""
        self.is_recording = not self.has_ended
        if self.has_ended and self.registration is not None:
            self.registration.remove()
        self.has_ended = True

    def record(self, tensor: Tensor) -> Tensor:
        """Record the storage of a saved tensor, unless it belongs to a parameter. Record tokens without the storage."""
        if not self.is_recording:
            return tensor
        if tensor.dtype == torch.int64:
            self.token_bytes[tensor.data_ptr()] = tensor.nbytes
            return tensor
        storage = tensor.untyped_storage()
        if storage not in self.storages and storage.data_ptr() not in self._list_parameter_addresses():
            self.storages.add(storage)
        return tensor

    def _start_backward(self, tensor: Tensor) -> Tensor:
        """Measure the storages when the backward pass needs the first one of them."""
        if self.is_recording and not self.kept_bytes:
            self.kept_bytes = self._measure()
        return tensor

    def _measure(self) -> int:
        """Return the present size of all storages, and update the largest size."""
        size = sum(storage.nbytes() for storage in self.storages) + sum(self.token_bytes.values())
        self.peak_bytes = max(self.peak_bytes, size)
        return size

    def _list_parameter_addresses(self) -> set[int]:
        """Return the addresses of the present parameters, which fully_shard replaces during a forward pass."""
        addresses = set()
        for parameter in self.model.parameters():
            detached = parameter.detach()
            local = detached.to_local() if hasattr(detached, "to_local") else detached
            addresses.add(local.untyped_storage().data_ptr())
        return addresses

    # ---- the interface RecomputeObserver

    @contextlib.contextmanager
    def observe_kept_results(self) -> Iterator[None]:
        """Record the results that the forward pass of a block keeps."""
        with NewStorages(self.storages, is_kept) if self.is_recording else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def observe_recomputation(self) -> Iterator[None]:
        """Record what the recomputation of a block creates, and measure what exists at its end."""
        if not self.is_recording:
            yield
            return
        self.has_recomputed = True
        with NewStorages(self.storages, lambda operation: True):
            try:
                yield
            finally:
                self._measure()


class NewStorages(TorchDispatchMode):
    """Context that adds the storages that operations create to a set. Views and changes in place create none.

    `is_added(operation)` selects the operations. Buffers of received messages do not count, because the thread that
    receives them frees them at any time after their use.
    """

    def __init__(self, storages: weakref.WeakSet[Any], is_added: Callable[[Any], bool]) -> None:
        super().__init__()
        self.storages = storages
        self.is_added = is_added

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == COLLECTIVE_NAMESPACE and func.__name__.startswith(RECEIVE):
            for tensor in flatten_tensors(args[0]):
                self.storages.discard(tensor.untyped_storage())
        elif self.is_added(func):
            arguments = {
                tensor.untyped_storage() for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)
            }
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.untyped_storage() not in arguments:
                    self.storages.add(tensor.untyped_storage())
        return result


class GatheredParameters(TorchDispatchMode):
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


class CollectiveCounter(TorchDispatchMode):
    """Context that counts the bytes that this rank sends in all-reduces, all-gathers, reduce-scatters and sends.

    Other operations, which a custom network may use, are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent_bytes = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == COLLECTIVE_NAMESPACE:
            self._count(func.__name__.partition(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        """Add the bytes that this rank sends in a message, or in a collective with a ring algorithm."""
        if name == SEND:
            self.sent_bytes += count_bytes(flatten_tensors(args[0]))
        if name not in BYTES_SENT:
            return
        ranks = next(dist.ProcessGroup.unbox(arg).size() for arg in args if isinstance(arg, torch.ScriptObject))
        full_tensors = args[1] if name == "_reduce_scatter_base_" else args[0]
        self.sent_bytes += BYTES_SENT[name] * (ranks - 1) / ranks * count_bytes(flatten_tensors(full_tensors))


def flatten_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists."""
    if isinstance(value, Tensor):
        return [value]
    tensors: list[Tensor] = []
    for item in value:
        tensors += flatten_tensors(item)
    return tensors
