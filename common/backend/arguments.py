"""Check the arguments of collectives: reductions, data types, and tensor sizes.

All arguments are checked before the first byte is sent. If a rank failed after that, the other ranks would keep waiting
for its data.
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

COMBINE_FUNCTIONS: dict[Operation, Combine] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,  # the sum is divided by the number of ranks at the end
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
BITWISE_OPS = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
ARITHMETIC_OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT)
INTEGER_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
HALF_PRECISION = (torch.float16, torch.bfloat16)
FLOAT_DTYPES = (*HALF_PRECISION, torch.float32, torch.float64)
COMPLEX_DTYPES = (torch.complex64, torch.complex128)


@functools.cache
def choose_precision(op: Operation, dtype: torch.dtype) -> torch.dtype:
    """Return the data type in which a reduction is computed.

    Sums and products of bfloat16 and float16 numbers are computed in float32.
    """
    return torch.float32 if op in ARITHMETIC_OPS and dtype in HALF_PRECISION else dtype


def list_reducible_dtypes(op: Operation) -> tuple[torch.dtype, ...]:
    """Return the data types that a reduction supports.

    Products of complex numbers are not included, because torch itself rejects them.
    """
    if op in BITWISE_OPS:
        return INTEGER_DTYPES
    if op == dist.ReduceOp.AVG:
        return (*FLOAT_DTYPES, *COMPLEX_DTYPES)
    return (
        (*INTEGER_DTYPES, *FLOAT_DTYPES, *COMPLEX_DTYPES)
        if op == dist.ReduceOp.SUM
        else (*INTEGER_DTYPES, *FLOAT_DTYPES)
    )


@functools.cache
def check_reduction(op: Operation, dtype: torch.dtype) -> None:
    """Raise NotImplementedError for an unsupported reduction, and TypeError for an unsupported data type.

    The sum of bool values is their logical `or`, and the product is their logical `and`.
    """
    if op not in COMBINE_FUNCTIONS:
        names = ", ".join(operation.name for operation in COMBINE_FUNCTIONS)
        raise NotImplementedError(f"builtin does not support the reduction {op.name}; supported reductions: {names}")
    if dtype not in list_reducible_dtypes(op):
        remedy = "; use SUM and divide the result" if dtype in INTEGER_DTYPES else ""
        raise TypeError(f"builtin does not support the reduction {op.name} of {dtype} tensors{remedy}")


def read_reduction(opts: Any, tensors: Sequence[Tensor]) -> Operation:
    """Return the reduction that is requested in the options of a call.

    Raises NotImplementedError or TypeError if the reduction does not support the tensors.
    """
    op: Operation = opts.reduceOp.op
    for tensor in tensors:
        check_dense(tensor)
        check_reduction(op, tensor.dtype)
    return op


def check_dense(tensor: Tensor) -> None:
    """Raise NotImplementedError if a tensor is not dense or is not on the CPU."""
    if not tensor.is_cpu or tensor.layout != torch.strided or tensor.is_quantized:
        raise NotImplementedError(
            f"builtin supports only dense tensors on the CPU (got {tensor.layout} on {tensor.device}); "
            "use tensor.to_dense(), tensor.cpu(), or another backend"
        )


def get_only_element(elements: Sequence[T]) -> T:
    """Return the only element of a list. Raises ValueError if the list does not have exactly one element."""
    if len(elements) != 1:
        raise ValueError(f"builtin expects one tensor or list per rank (got {len(elements)})")
    return elements[0]


def check_same_size_and_type(left: Tensor, right: Tensor) -> None:
    """Raise ValueError if two tensors have different numbers of elements or different data types."""
    check_dense(left)
    check_dense(right)
    if left.numel() != right.numel() or left.dtype != right.dtype:
        raise ValueError(
            f"tensors do not match: one has {left.numel()} elements of {left.dtype}, and the other has "
            f"{right.numel()} elements of {right.dtype}"
        )


def check_one_tensor_per_rank(blocks: Sequence[Tensor], size: int) -> Sequence[Tensor]:
    """Return `blocks` after checking that this list contains one dense tensor for each of the `size` ranks.

    Raises ValueError if the length of the list is not `size`.
    """
    if len(blocks) != size:
        raise ValueError(f"expected a list with one tensor for each of the {size} ranks, but got {len(blocks)} tensors")
    for block in blocks:
        check_dense(block)
    return blocks


def split_equally(tensor: Tensor, size: int, part: Tensor) -> Sequence[Tensor]:
    """Divide a contiguous tensor into `size` parts that have the size and data type of `part`.

    Raises ValueError if the tensor is not contiguous, or if its size or data type does not match that of the parts.
    """
    check_dense(tensor)
    check_dense(part)
    is_contiguous = tensor.is_contiguous()
    if tensor.numel() != size * part.numel() or tensor.dtype != part.dtype or not is_contiguous:
        layout = "" if is_contiguous else " and is not contiguous"
        raise ValueError(
            f"the tensor for all ranks has {tensor.numel()} elements of dtype {tensor.dtype}{layout}; "
            f"it must be contiguous and have {size} x {part.numel()} elements of dtype {part.dtype}"
        )
    return tensor.detach().view(-1).tensor_split(size)


def split_rows(tensor: Tensor, size: int, rows: Sequence[int]) -> Sequence[Tensor]:
    """Divide the rows of a tensor among `size` ranks.

    Rank r gets `rows[r]` rows. If `rows` is empty, all ranks get the same number of rows. Raises ValueError if the
    tensor does not have the required number of rows.
    """
    check_dense(tensor)
    count = tensor.shape[0]
    if not rows and count % size:
        raise ValueError(f"{count} rows cannot be divided equally among {size} ranks; pass the number of rows per rank")
    if rows and (len(rows) != size or sum(rows) != count):
        raise ValueError(f"expected {size} row counts that add up to {count} (got {list(rows)})")
    return tensor.detach().split(list(rows)) if rows else tensor.detach().tensor_split(size)
