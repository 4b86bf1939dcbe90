"""Sizes of tensors in nested containers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor


def list_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested dicts and lists."""
    if isinstance(value, Tensor):
        return [value]
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    tensors: list[Tensor] = []
    for item in items:
        tensors += list_tensors(item)
    return tensors


def count_bytes(values: Iterable[Any]) -> int:
    """Return the size of this rank's parts of all tensors among `values`."""
    total = 0
    for value in values:
        local = value.to_local() if hasattr(value, "to_local") else value
        if isinstance(local, Tensor):
            total += local.numel() * local.element_size()
    return total
