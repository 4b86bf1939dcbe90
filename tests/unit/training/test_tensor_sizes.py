from __future__ import annotations

import torch

from common.training.tensor_sizes import count_bytes, list_tensors


def test_tensors_in_nested_containers_are_found() -> None:
    first = torch.ones(2)
    second = torch.ones(3, dtype=torch.float64)
    tensors = list_tensors({"a": {"b": first, "c": 1}, "d": "text", "e": [(second,), None]})
    assert tensors == [first, second]
    assert count_bytes(tensors) == 2 * 4 + 3 * 8
