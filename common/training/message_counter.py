"""Counting of the bytes that a rank sends through torch.distributed."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.library import Library

from common.training.saved_tensors import COLLECTIVE_NAMESPACE
from common.training.tensor_sizes import count_bytes, list_tensors


class MessageSize(NamedTuple):
    """The bytes that a rank sends in a collective among p ranks, on average over the ranks."""

    factor: int
    """Multiple of (p - 1) / p times the size of a tensor."""
    argument: int
    """Position of this tensor, or of a list of such tensors, among the arguments of the operation."""


RING_SIZES = {
    "allreduce_": MessageSize(2, 0),
    "allreduce_coalesced_": MessageSize(2, 0),
    "allgather_": MessageSize(1, 0),
    "allgather_coalesced_": MessageSize(1, 0),
    "allgather_into_tensor_coalesced_": MessageSize(1, 0),
    "_allgather_base_": MessageSize(1, 0),
    "reduce_scatter_": MessageSize(1, 1),
    "reduce_scatter_tensor_coalesced_": MessageSize(1, 1),
    "_reduce_scatter_base_": MessageSize(1, 1),
    "alltoall_": MessageSize(1, 1),
    "alltoall_base_": MessageSize(1, 1),
    "broadcast_": MessageSize(1, 0),
    "reduce_": MessageSize(1, 0),
    "gather_": MessageSize(1, 1),
    "scatter_": MessageSize(1, 0),
}
"""Collectives by the names of their operations.

All-gathers, reduce-scatters and all-reduces use a ring (Patarasuk and Yuan 2009). In any tree, p - 1 ranks send or
receive the tensor of a broadcast or a reduction once. In gather and scatter, p - 1 ranks exchange their tensor with the
root.
"""
SEND = "send"
"""Name of the operation that sends a tensor to one rank."""


class MessageCounter:
    """Context that counts the bytes that this rank sends in messages and collectives of all threads.

    The operations of torch.distributed have no derivatives. In this context, their kernel for autograd counts the bytes
    before it calls the backend. Unlike a `TorchDispatchMode`, a kernel applies to the threads of autograd and of
    callbacks too.
    """

    def __init__(self) -> None:
        self.sent_bytes = 0.0
        self.lock = threading.Lock()
        self.library: Library | None = None

    def __enter__(self) -> MessageCounter:
        self.library = Library(COLLECTIVE_NAMESPACE, "IMPL")
        for name in (SEND, *RING_SIZES):
            self._register_kernel(self.library, name)
        return self

    def __exit__(self, *error: object) -> None:
        self.library = None  # deletes the kernels

    def _register_kernel(self, library: Library, name: str) -> None:
        operation = getattr(getattr(torch.ops, COLLECTIVE_NAMESPACE), name).default

        def count_and_send(keys: Any, *arguments: Any) -> Any:
            self._count(name, arguments)
            return operation.redispatch(keys & torch._C._after_autograd_keyset, *arguments)

        library.impl(name, count_and_send, "Autograd", with_keyset=True)

    def _count(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name == SEND:
            size = float(count_bytes(list_tensors(arguments[0])))
        else:
            factor, position = RING_SIZES[name]
            ranks = next(
                dist.ProcessGroup.unbox(arg).size() for arg in arguments if isinstance(arg, torch.ScriptObject)
            )
            size = factor * (ranks - 1) / ranks * count_bytes(list_tensors(arguments[position]))
        with self.lock:
            self.sent_bytes += size
