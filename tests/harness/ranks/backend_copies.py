"""Cases of backend_calls.py: collectives that copy tensors, and unusual or overlapping arguments."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

from common.ranks.rendezvous import World
from tests.harness.ranks.backend_tensors import SIZES, assert_equal_bits, compute_reduction, draw_inputs, require_work

COPIED_DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn)


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
        require_work(dist.all_reduce(tensor, async_op=True)).wait()
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


CASES = {
    "copies": check_copies,
    "all_to_all": check_all_to_all,
    "overlapping_arguments": check_overlapping_arguments,
    "unusual_tensors": check_unusual_tensors,
    "objects": check_objects,
}
