"""Measurement of the activations that are kept for the backward pass."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from common.training.observing_mode import ObservingMode
from common.training.tensor_sizes import list_tensors

COLLECTIVE_NAMESPACE = "c10d"
RECEIVE = "recv_"
"""Start of the names of operations that receive a tensor from one rank."""


class ObservedModule(Protocol):
    """A module that keeps or recomputes activations that autograd does not save."""

    activation_observer: SavedTensors | None
    """What observes these activations; None if nothing does."""


class SavedTensor:
    """A tensor that autograd keeps for the backward pass. It is released when autograd frees it."""

    def __init__(self, tensor: Tensor, address: int | None, release: Callable[[int], None]) -> None:
        """Keep a tensor. `address` is None if the tensor is not counted."""
        self.tensor = tensor.detach()  # an output of a node would otherwise keep its own node alive
        self.address = address
        self.release = release

    def __del__(self) -> None:
        if self.address is not None:
            self.release(self.address)


class SavedTensors:
    """Context in which the storages that are held for backward passes are observed.

    Autograd saves most of them. Modules that implement `ObservedModule` report others. A storage is counted once,
    however many tensors use it. The data loader keeps several batches in one storage. Therefore, inputs of the model
    and integers, such as targets, are counted by their own size.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.parts = parts
        self.modules: list[nn.Module] = []
        """All modules of the parts."""
        self.local_tensors: dict[nn.Parameter, Tensor] = {}
        """This rank's part of each parameter. fully_shard resizes its storage, but does not replace it."""
        self.hooks = saved_tensors_hooks(self.save, lambda saved: saved.tensor)
        self.sizes: dict[int, int] = {}
        """Size in bytes of each storage that autograd holds, and of each tensor that is counted by its own size."""
        self.holders: Counter[int] = Counter()
        """Number of saved tensors by the same addresses."""
        self.input_storages: set[int] = set()
        self.bytes = 0
        """Size of all storages that autograd holds."""
        self.kept: weakref.WeakSet[Any] = weakref.WeakSet()
        """Storages that modules keep between their forward and their backward pass."""
        self.recomputed: weakref.WeakSet[Any] = weakref.WeakSet()
        """Storages that modules have computed again for a backward pass."""
        self.peak_bytes = 0
        """Largest size of all storages that are held between passes."""
        self.peak_recomputed_bytes = 0
        """Largest size of all storages, including recomputed ones."""
        self.has_recomputed = False
        self.contexts = contextlib.ExitStack()

    def __enter__(self) -> SavedTensors:
        for part in self.parts:
            registration: RemovableHandle = part.register_forward_pre_hook(self._note_inputs)
            self.contexts.callback(registration.remove)
            for module in part.modules():
                self.modules.append(module)
                if hasattr(module, "activation_observer"):
                    self.contexts.callback(setattr, module, "activation_observer", None)
                    setattr(module, "activation_observer", self)  # noqa: B010
        self.contexts.enter_context(self.hooks)
        return self

    def __exit__(self, *error: object) -> None:
        self.contexts.close()

    def _note_inputs(self, part: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Note the storages of inputs that no operation has computed: the batches of the data loader.

        Such an input may require a gradient.
        """
        for value in inputs:
            if isinstance(value, Tensor) and value.is_leaf:
                self.input_storages.add(value.untyped_storage().data_ptr())

    def save(self, tensor: Tensor) -> SavedTensor:
        """Count the storage of a tensor until autograd frees the result, unless it belongs to a parameter."""
        storage = tensor.untyped_storage()
        has_own_size = tensor.dtype == torch.int64 or storage.data_ptr() in self.input_storages
        address = tensor.data_ptr() if has_own_size else storage.data_ptr()
        if address not in self.sizes:
            # The address of a parameter may be that of an activation later, because fully_shard frees parameters.
            if address in self._list_parameter_addresses():
                return SavedTensor(tensor, None, self._release)
            self.sizes[address] = tensor.nbytes if has_own_size else storage.nbytes()
            self.bytes += self.sizes[address]
            self._update_peak()
        self.holders[address] += 1
        return SavedTensor(tensor, address, self._release)

    def _release(self, address: int) -> None:
        """Stop counting a storage after its last saved tensor is freed."""
        self.holders[address] -= 1
        if not self.holders[address]:
            self.bytes -= self.sizes.pop(address, 0)

    def _list_parameter_addresses(self) -> set[int]:
        """Return the addresses of the present parameters, which fully_shard replaces during a forward pass."""
        addresses = set()
        for module in self.modules:
            for parameter in module.parameters(recurse=False):
                if parameter not in self.local_tensors:
                    detached: Any = parameter.detach()
                    local = detached.to_local() if hasattr(detached, "to_local") else detached
                    self.local_tensors[parameter] = local
                addresses.add(self.local_tensors[parameter].untyped_storage().data_ptr())
        return addresses

    def _update_peak(self) -> None:
        """Compare the present size of all storages between passes with the largest one."""
        self.peak_bytes = max(self.peak_bytes, self.bytes + self._measure(set(self.kept)))
        self.peak_recomputed_bytes = max(self.peak_recomputed_bytes, self.peak_bytes)

    def _measure(self, storages: set[Any]) -> int:
        """Return the size of storages that autograd does not hold."""
        return sum(storage.nbytes() for storage in storages if storage.data_ptr() not in self.sizes)

    def count_kept(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that a module keeps until its backward pass."""
        self.kept.update(tensor.untyped_storage() for tensor in tensors)
        self._update_peak()

    @contextlib.contextmanager
    def observe_kept_results(self, is_kept: Callable[[Any], bool]) -> Iterator[None]:
        """Count the results that a forward pass keeps. `is_kept(operation)` selects the operations."""
        with NewStorages(self.kept, is_kept):
            yield
        self._update_peak()

    @contextlib.contextmanager
    def observe_recomputation(self) -> Iterator[None]:
        """Count what a recomputation creates. It usually ends with an exception that torch handles."""
        self.has_recomputed = True
        with NewStorages(self.recomputed, lambda operation: True):
            try:
                yield
            finally:
                size = self.bytes + self._measure(set(self.kept) | set(self.recomputed))
                self.peak_recomputed_bytes = max(self.peak_recomputed_bytes, size)


class NewStorages(ObservingMode):
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
            for tensor in list_tensors(args[0]):
                self.storages.discard(tensor.untyped_storage())
        elif self.is_added(func):
            arguments = {
                tensor.untyped_storage() for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)
            }
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.untyped_storage() not in arguments:
                    self.storages.add(tensor.untyped_storage())
        return result
