"""Arguments of collectives: what can be reduced and how, and tensors that fit together.

All of it is checked before the first byte is sent: a rank that fails later would leave the others waiting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
Operation = dist.ReduceOp.RedOpType
Combine = Callable[..., Tensor]

COMBINE: dict[Operation, Combine] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,  # divided by the number of ranks at the end
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
ARITHMETIC = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT)
WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)


@functools.cache
def choose_precision(op: Operation, dtype: torch.dtype) -> torch.dtype:
    """Return the type in which numbers are added up or multiplied: float32 for bfloat16 and float16."""
    return torch.float32 if op in ARITHMETIC and dtype in (torch.float16, torch.bfloat16) else dtype


def list_reducible_dtypes(op: Operation) -> tuple[torch.dtype, ...]:
    """Return the types of numbers that an operation reduces; torch itself refuses products of complex ones."""
    if op in BITWISE:
        return WHOLE
    if op == dist.ReduceOp.AVG:
        return (*REAL, *COMPLEX)
    return (*WHOLE, *REAL, *COMPLEX) if op == dist.ReduceOp.SUM else (*WHOLE, *REAL)


@functools.cache
def check_reduction(op: Operation, dtype: torch.dtype) -> None:
    """Raise NotImplementedError for an operation, and TypeError for numbers, that are not reduced.

    A sum of bool is `or`, a product `and`.
    """
    if op not in COMBINE:
        known = ", ".join(one.name for one in COMBINE)
        raise NotImplementedError(f"builtin has no reduction {op.name}; it has {known}")
    if dtype not in list_reducible_dtypes(op):
        remedy = "; use SUM, and divide" if dtype in WHOLE else ""
        raise TypeError(f"builtin has no reduction {op.name} of {dtype}{remedy}")


def read_op(opts: Any, tensors: Sequence[Tensor]) -> Operation:
    """Return the operation of a call. Raises where these tensors are not reduced."""
    op: Operation = opts.reduceOp.op
    for tensor in tensors:
        check_dense(tensor)
        check_reduction(op, tensor.dtype)
    return op


def check_dense(tensor: Tensor) -> None:
    """Raise NotImplementedError for a tensor that is not numbers in main memory."""
    if not tensor.is_cpu or tensor.layout != torch.strided or tensor.is_quantized:
        raise NotImplementedError(
            f"builtin carries dense tensors of the CPU only, not {tensor.layout} on {tensor.device}; "
            "use tensor.to_dense(), tensor.cpu() or another backend"
        )


def take_only_element(values: Sequence[T]) -> T:
    """Return the only element of a list. Raises ValueError."""
    if len(values) != 1:
        raise ValueError(f"builtin takes one tensor or list for each rank, not {len(values)}")
    return values[0]


def check_same_size_and_type(one: Tensor, other: Tensor) -> None:
    """Raise ValueError unless two tensors hold as many numbers of the same type."""
    check_dense(one)
    check_dense(other)
    if one.numel() != other.numel() or one.dtype != other.dtype:
        raise ValueError(
            f"tensors do not fit together: {one.numel()} numbers of {one.dtype}, {other.numel()} of {other.dtype}"
        )


def check_blocks(blocks: Sequence[Tensor], size: int) -> Sequence[Tensor]:
    """Return a list with a tensor for each of `size` ranks. Raises ValueError for another number of them."""
    if len(blocks) != size:
        raise ValueError(f"the list has {len(blocks)} tensors, needs one for each of {size} ranks")
    for block in blocks:
        check_dense(block)
    return blocks


def cut_equally(whole: Tensor, size: int, part: Tensor) -> Sequence[Tensor]:
    """Return the `size` equal parts of a contiguous tensor, each like `part`. Raises ValueError."""
    check_dense(whole)
    check_dense(part)
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype or not whole.is_contiguous():
        gaps = "" if whole.is_contiguous() else ", not contiguous"
        raise ValueError(
            f"the tensor of all ranks has {whole.numel()} numbers of {whole.dtype}{gaps}, needs {size} times "
            f"{part.numel()} of {part.dtype} in a row"
        )
    return whole.detach().view(-1).tensor_split(size)


def cut_rows(whole: Tensor, size: int, rows: Sequence[int]) -> Sequence[Tensor]:
    """Return a tensor's rows for each of `size` ranks: equal parts, or as many as `rows` says. Raises ValueError."""
    check_dense(whole)
    if not rows and whole.shape[0] % size:
        raise ValueError(f"{whole.shape[0]} rows cannot be shared evenly by {size} ranks; give the numbers of rows")
    if rows and (len(rows) != size or sum(rows) != whole.shape[0]):
        raise ValueError(f"rows {list(rows)} do not share {whole.shape[0]} rows among {size} ranks")
    return whole.detach().split(list(rows)) if rows else whole.detach().tensor_split(size)
