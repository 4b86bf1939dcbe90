"""Tensors and assertions for the cases of backend_calls.py.

Every rank can draw the tensors of the other ranks, so it can compute the expected result.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from common.backend.arguments import ARITHMETIC_OPS, COMPLEX_DTYPES, INTEGER_DTYPES
from configs.shared import Launch

SETTINGS = Launch(backend="builtin", threads=1, setup_timeout=60, step_timeout=60)
SIZES = (0, 1, 2, 7, 1000, 40_001)  # fewer than the ranks, not a multiple of them, more than one message
HALF_DTYPES = (torch.bfloat16, torch.float16)
ARITHMETIC_FUNCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add, dist.ReduceOp.AVG: torch.add, dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or, dist.ReduceOp.BXOR: torch.bitwise_xor,
}  # fmt: skip


def draw_input(rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Draw the tensor of a rank: small integers, or fractions for bfloat16 and float16, whose sums are rounded."""
    generator = torch.Generator().manual_seed(100 * rank + sum(shape))
    if dtype in HALF_DTYPES:
        return torch.rand(*shape, generator=generator).to(dtype)
    low = 0 if dtype in INTEGER_DTYPES else -3
    high = 2 if dtype == torch.bool else 4
    tensor = torch.randint(low, high, shape, generator=generator).to(dtype)
    return tensor * (1 + 2j) if dtype in COMPLEX_DTYPES else tensor


def draw_inputs(shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Draw the tensors of all ranks."""
    return [draw_input(rank, shape, dtype) for rank in range(dist.get_world_size())]


def compute_reduction(tensors: Sequence[Tensor], op: Any) -> Tensor:
    """Compute a reduction by arithmetic, for bfloat16 and float16 in float32 with one rounding."""
    dtype = tensors[0].dtype
    if dtype in COMPLEX_DTYPES:  # as in torch
        return torch.view_as_complex(compute_reduction([torch.view_as_real(tensor) for tensor in tensors], op))
    is_rounded = op in ARITHMETIC_OPS and dtype in HALF_DTYPES
    total_dtype = torch.float32 if is_rounded else dtype
    total = tensors[0].to(total_dtype)
    for tensor in tensors[1:]:
        total = ARITHMETIC_FUNCTIONS[op](total, tensor.to(total_dtype))
    if op == dist.ReduceOp.AVG:
        total = total / len(tensors)
    return total.to(dtype)


def assert_equal_bits(received: Iterable[Tensor], expected: Iterable[Tensor], label: object = None) -> None:
    """Compare tensors by their bytes, because NaN != NaN, and torch.equal does not support float8."""
    for received_tensor, expected_tensor in zip(received, expected, strict=True):
        assert torch.equal(received_tensor.view(torch.uint8), expected_tensor.view(torch.uint8)), label


def make_group(ranks: list[int], **options: Any) -> dist.ProcessGroup:
    group = dist.new_group(ranks, **options)
    assert isinstance(group, dist.ProcessGroup)
    return group


def require_work(work: dist.Work | None) -> dist.Work:
    """Check that an asynchronous call has returned a handle, as on all members of the group."""
    assert work is not None
    return work


def assert_times_out(work: dist.Work) -> None:
    with pytest.raises(TimeoutError):
        work.wait(datetime.timedelta(seconds=0.02))


def wait_for_all(works: Iterable[dist.Work | None]) -> None:
    for work in works:
        require_work(work).wait()
