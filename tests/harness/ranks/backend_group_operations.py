"""Cases of backend_calls.py: reductions and copies of every dtype and size, and unusual arguments.

Every rank can draw the tensors of the other ranks, so it can compute the expected result.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.backend import setup, torch_registration
from common.backend.algorithms import ALGORITHM_NAMES
from common.backend.arguments import (
    ARITHMETIC_OPS,
    COMBINE_FUNCTIONS,
    COMPLEX_DTYPES,
    INTEGER_DTYPES,
    list_reducible_dtypes,
)
from common.ranks.rank_info import RankInfo
from common.ranks.rendezvous import World
from configs.shared import Launch

SETTINGS = Launch(backend="builtin", threads=1, setup_timeout=60, step_timeout=60)
SIZES = (0, 1, 2, 7, 1000, 40_001)  # fewer than the ranks, not a multiple of them, more than one message
HALF_DTYPES = (torch.bfloat16, torch.float16)
COPIED_DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn)
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


# ---- reductions


def list_reductions() -> list[tuple[Any, torch.dtype]]:
    """Return every operation with every dtype that it supports."""
    reductions = []
    for op in COMBINE_FUNCTIONS:
        reductions += [(op, dtype) for dtype in list_reducible_dtypes(op)]
    return reductions


def assert_reduced(reduced: Tensor, expected: Tensor, label: object) -> None:
    """Compare exactly, but allow bfloat16 and float16 one unit in the last place, because products are rounded."""
    if reduced.dtype in HALF_DTYPES:
        torch.testing.assert_close(reduced, expected, rtol=torch.finfo(reduced.dtype).eps, atol=0, msg=str(label))
    else:
        assert torch.equal(reduced, expected), label


def check_reductions(world: World) -> None:
    """all_reduce, reduce and reduce_scatter of every dtype and size."""
    for op, dtype in list_reductions():
        for length in SIZES if dtype in (torch.float32, torch.bfloat16) else (1, 1000):
            check_reduce(world, op, dtype, length)
            check_reduce_scatter(world, op, dtype, length)


def check_reduce(world: World, op: Any, dtype: torch.dtype, length: int) -> None:
    inputs = draw_inputs((length,), dtype)
    expected = compute_reduction(inputs, op)
    reduced = inputs[world.rank].clone()
    dist.all_reduce(reduced, op)
    assert_reduced(reduced, expected, ("all_reduce", op, dtype, length))

    root = world.size - 1
    reduced = inputs[world.rank].clone()
    dist.reduce(reduced, root, op)
    expected_on_rank = expected if world.rank == root else inputs[world.rank]
    assert_reduced(reduced, expected_on_rank, ("reduce", op, dtype, length))


def check_reduce_scatter(world: World, op: Any, dtype: torch.dtype, length: int) -> None:
    blocks = draw_inputs((world.size, length), dtype)
    expected = compute_reduction(blocks, op)[world.rank]
    reduced = torch.empty(length, dtype=dtype)
    dist.reduce_scatter(reduced, list(blocks[world.rank]), op)
    assert_reduced(reduced, expected, ("reduce_scatter", op, dtype, length))
    dist.reduce_scatter_tensor(reduced.zero_(), blocks[world.rank], op)
    assert_reduced(reduced, expected, ("reduce_scatter_tensor", op, dtype, length))


def check_half_precision_sums(world: World) -> None:
    """Sums that float32 represents exactly are rounded once, and not at each addition."""
    for dtype in HALF_DTYPES:
        inputs = [torch.full((50,), 1.0 + rank / 64, dtype=dtype) for rank in range(world.size)]
        inputs[0] += 96
        exact = torch.stack(inputs).double().sum(0).to(dtype)
        reduced = inputs[world.rank].clone()
        dist.all_reduce(reduced)
        assert torch.equal(reduced, exact), dtype
        scattered = torch.empty(50, dtype=dtype)
        dist.reduce_scatter(scattered, [inputs[world.rank]] * world.size)
        assert torch.equal(scattered, exact), dtype


def check_reproducible_bits(world: World) -> None:
    """Sums of every algorithm and dtype have equal bits on all ranks and when repeated, also with NaN and inf."""
    ranks = list(range(world.size))
    gloo = make_group(ranks, backend="gloo")
    rank_info = RankInfo(size=world.size, local_size=world.size)
    transport = setup.make_transport_settings(rank_info, SETTINGS, world.hosts, "lo")
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
    for name in ALGORITHM_NAMES:
        torch_registration.register_backend(dataclasses.replace(transport, run="bits", algorithm=name))
        group = make_group(ranks, backend="builtin")
        for dtype, length in itertools.product(dtypes, (1, 5, 30_001)):
            label = (name, dtype, length)
            tensor = draw_with_nan(world.rank, dtype, length)
            first_sum = tensor.clone()
            dist.all_reduce(first_sum, group=group)
            second_sum = tensor.clone()
            dist.all_reduce(second_sum, group=group)
            assert_equal_bits([second_sum], [first_sum], (*label, "repeated"))

            gathered = [torch.empty_like(first_sum).view(torch.uint8) for _ in ranks]
            dist.all_gather(gathered, first_sum.view(torch.uint8), group=gloo)
            assert_equal_bits(gathered, [gathered[0]] * world.size, label)
            if dtype != torch.int64 and length >= 5 and world.size > 1:
                assert first_sum.isnan().any(), label
        dist.destroy_process_group(group)
    torch_registration.register_backend(transport)


def draw_with_nan(rank: int, dtype: torch.dtype, length: int) -> Tensor:
    """Draw the tensor of a rank. Floating-point tensors contain NaN or inf, and -inf."""
    generator = torch.Generator().manual_seed(rank)
    tensor = torch.randn(length, dtype=torch.float64, generator=generator).to(dtype)
    if dtype.is_floating_point:
        tensor[length // 2 :: 7] = float("nan") if rank % 2 else float("inf")
        tensor[length // 3 :: 11] = float("-inf")
    return tensor


# ---- copies


def check_copies(world: World) -> None:
    """Collectives without arithmetic, of every dtype and size."""
    rank = world.rank
    root = world.size - 1
    for dtype, length in itertools.product(COPIED_DTYPES, SIZES):
        inputs = [tensor.to(dtype) for tensor in draw_inputs((length,), torch.uint8)]
        received = inputs[rank].clone()
        dist.broadcast(received, root)
        assert_equal_bits([received], [inputs[root]], ("broadcast", dtype, length))

        outputs = [torch.empty_like(received) for _ in range(world.size)]
        dist.all_gather(outputs, inputs[rank])
        assert_equal_bits(outputs, inputs, "all_gather")
        output = torch.empty(world.size * length, dtype=dtype)
        dist.all_gather_into_tensor(output, inputs[rank])
        assert_equal_bits(output.chunk(world.size), inputs, "all_gather_into_tensor")

        outputs = [torch.empty_like(received) for _ in range(world.size)]
        dist.gather(inputs[rank], outputs if rank == root else None, root)
        if rank == root:
            assert_equal_bits(outputs, inputs, "gather")
        dist.scatter(received, inputs if rank == root else None, root)
        assert_equal_bits([received], [inputs[rank]], "scatter")
        dist.barrier()


def check_all_to_all(world: World) -> None:
    """All-to-all of equal rows, in place, of lists, and of unequal numbers of rows."""
    rank = world.rank
    size = world.size
    table = torch.arange(size * size * 3).view(size, size, 3)  # [from, to, 3]
    expected = table[:, rank]
    received = torch.empty(size, 3, dtype=torch.int64)
    dist.all_to_all_single(received, table[rank].contiguous())
    assert torch.equal(received, expected)
    in_place = table[rank].clone()
    dist.all_to_all_single(in_place, in_place)
    assert torch.equal(in_place, expected)
    outputs = [torch.empty(3, dtype=torch.int64) for _ in range(size)]
    dist.all_to_all(outputs, list(table[rank]))
    assert torch.equal(torch.stack(outputs), expected)

    row_counts = list(range(1, size + 1))  # rank n receives n + 1 rows from each rank
    sent = torch.cat([torch.full((target + 1, 2), 10 * rank + target) for target in range(size)])
    received = torch.empty(size * (rank + 1), 2, dtype=sent.dtype)
    dist.all_to_all_single(received, sent, [rank + 1] * size, row_counts)
    expected = torch.cat([torch.full((rank + 1, 2), 10 * source + rank) for source in range(size)])
    assert torch.equal(received, expected)


def check_overlapping_arguments(world: World) -> None:
    """Inputs that are slices of outputs, as in FSDP2, and outputs that are slices of inputs."""
    for length in (3, 20_000):
        check_all_gather_from_slice(world, length)
        check_reduce_scatter_into_slice(world, length)
        check_gather_and_scatter_of_slices(world, length)


def check_all_gather_from_slice(world: World, length: int) -> None:
    inputs = draw_inputs((length,), torch.float32)
    # The second slice belongs to another rank, and is overwritten.
    for position in (world.rank, (world.rank + 1) % world.size):
        output = torch.zeros(world.size, length)
        output[position] = inputs[world.rank]
        dist.all_gather_into_tensor(output.view(-1), output[position])
        assert torch.equal(output, torch.stack(inputs)), length


def check_reduce_scatter_into_slice(world: World, length: int) -> None:
    tables = draw_inputs((world.size, length), torch.float32)
    expected = compute_reduction(tables, dist.ReduceOp.SUM)[world.rank]
    for position in (world.rank, (world.rank + 1) % world.size):
        table = tables[world.rank].clone()
        dist.reduce_scatter_tensor(table[position], table)
        assert torch.equal(table[position], expected), (length, position)


def check_gather_and_scatter_of_slices(world: World, length: int) -> None:
    rank = world.rank
    tables = draw_inputs((world.size, length), torch.float32)
    for root in range(world.size):
        position = (root + 1) % world.size
        table = tables[rank].clone()
        dist.gather(table[position], list(table) if rank == root else None, root)
        gathered = torch.stack([table_of_rank[position] for table_of_rank in tables])
        expected = gathered if rank == root else tables[rank]
        assert torch.equal(table, expected)
        table = tables[rank].clone()
        dist.scatter(table[0], list(table) if rank == root else None, root)
        assert torch.equal(table[0], tables[root][rank])


def check_unusual_tensors(world: World) -> None:
    """Strided tensors, whose gaps stay unchanged, scalars, parameters, and tensors of inference mode."""
    rank = world.rank
    size = world.size
    total = size * (size + 1) / 2
    base = torch.zeros(4, 6)
    base[:, ::2] = rank + 1
    dist.all_reduce(base[:, ::2])
    assert torch.equal(base[:, ::2], torch.full((4, 3), total))
    assert not base[:, 1::2].any()
    dist.all_reduce(base.t())

    scalar = torch.tensor(float(rank + 1))
    dist.all_reduce(scalar)
    assert scalar.item() == total

    parameter = torch.nn.Parameter(torch.full((3,), float(rank + 1)))
    version = parameter._version
    dist.all_reduce(parameter)
    dist.broadcast(parameter, 0)
    assert parameter.detach().eq(total).all()
    assert parameter._version == version

    with torch.inference_mode():
        contiguous = torch.full((2, 3), float(rank + 1))
        transposed = torch.full((3, 2), float(rank + 1)).t()
    for tensor in (contiguous, transposed):
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        assert tensor.eq(total).all()

    gathered = torch.empty(size, 2, 3)
    dist.all_gather(list(gathered.transpose(1, 2)), torch.full((3, 2), float(rank)))
    assert torch.equal(gathered[:, 0, 0], torch.arange(float(size)))


def check_objects(world: World) -> None:
    """torch.distributed functions that pickle objects; this repository does not call them."""
    rank = world.rank
    size = world.size
    broadcast: list[Any] = [{"rank": rank}, None]
    dist.broadcast_object_list(broadcast, size - 1)  # noqa: TID251
    assert broadcast == [{"rank": size - 1}, None]
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, ("x" * rank, rank))  # noqa: TID251
    assert gathered == [("x" * source, source) for source in range(size)]
    dist.gather_object(rank, gathered if rank == 0 else None, 0)  # noqa: TID251
    if rank == 0:
        assert gathered == list(range(size))
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, list(range(size)) if rank == 0 else None, 0)  # noqa: TID251
    assert scattered == [rank]
    assert world.broadcast(rank) == 0
