"""Addresses of the memory of tensors, by which memory that several tensors share is counted once."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def find_address(tensor: Tensor) -> tuple[int, int]:
    """Return the address and the size in bytes of the storage of a tensor, or of tokens without their storage."""
    if tensor.dtype == torch.int64:
        return tensor.data_ptr(), tensor.nbytes
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def list_parameter_addresses(model: nn.Module) -> set[int]:
    """Return the addresses of the present parameters, which fully_shard replaces during a forward pass."""
    addresses = set()
    for parameter in model.parameters():
        detached = parameter.detach()
        local = detached.to_local() if hasattr(detached, "to_local") else detached
        addresses.add(local.untyped_storage().data_ptr())
    return addresses
