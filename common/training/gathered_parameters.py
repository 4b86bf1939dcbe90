"""Observation of the parameters that `fully_shard` gathers in a step, and of their gradients."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from common.training.observing_mode import ObservingMode
from common.training.tensor_sizes import count_bytes

GATHER_OPERATION = "fsdp::split_with_sizes_copy"
"""Operation of `fully_shard` that copies the result of an all-gather to the gathered parameters."""


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


def free_gathered_parameters(model: nn.Module) -> None:
    """Free the parameters that an evaluation has left gathered, so that the next step gathers them like later steps."""
    for module in model.modules():
        reshard: Any = getattr(module, "reshard", None)  # added by fully_shard
        if reshard is not None:
            reshard()
