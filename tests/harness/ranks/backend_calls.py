"""Collectives of the backend `builtin`, compared with gloo and with arithmetic, for test_process_group.py.

    python -m tests.harness.ranks.backend_calls RANKS TRANSPORT [CASE ...]   execute cases on RANKS ranks; all but `ddp`

Every rank can draw the tensors of the other ranks, so it can compute the expected result.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import itertools
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from common.backend import algorithm_choice, setup, torch_registration
from common.backend.algorithms import ALGORITHM_NAMES, build_algorithm, count_bytes_per_rank
from common.backend.arguments import (
    ARITHMETIC_OPS,
    COMBINE_FUNCTIONS,
    COMPLEX_DTYPES,
    INTEGER_DTYPES,
    list_reducible_dtypes,
)
from common.config.config import read_config_file, read_settings
from common.ranks import local_launcher, rendezvous
from common.ranks.rank_info import RankInfo
from configs.shared import Launch

SETTINGS = Launch(backend="builtin", threads=1, setup_timeout=60, step_timeout=60)
SIZES = (0, 1, 2, 7, 1000, 40_001)  # fewer than the ranks, not a multiple of them, more than one message
ARITHMETIC_OF: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add, dist.ReduceOp.AVG: torch.add, dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or, dist.ReduceOp.BXOR: torch.bitwise_xor,
}  # fmt: skip
HALF_DTYPES = (torch.bfloat16, torch.float16)
COPIED_DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn)


def draw(rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Draw the tensor of a rank: small integers, or fractions for bfloat16 and float16, whose sums are rounded."""
    generator = torch.Generator().manual_seed(100 * rank + sum(shape))
    if dtype in HALF_DTYPES:
        return torch.rand(*shape, generator=generator).to(dtype)
    low = 0 if dtype in INTEGER_DTYPES else -3
    high = 2 if dtype == torch.bool else 4
    tensor = torch.randint(low, high, shape, generator=generator).to(dtype)
    return tensor * (1 + 2j) if dtype in COMPLEX_DTYPES else tensor


def draw_all(shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Draw the tensors of all ranks."""
    return [draw(rank, shape, dtype) for rank in range(dist.get_world_size())]


def reduce_here(tensors: Sequence[Tensor], op: Any) -> Tensor:
    """Compute a reduction by arithmetic, for bfloat16 and float16 in float32 with one rounding."""
    dtype = tensors[0].dtype
    if dtype in COMPLEX_DTYPES:  # as in torch
        return torch.view_as_complex(reduce_here([torch.view_as_real(tensor) for tensor in tensors], op))
    total_dtype = torch.float32 if op in ARITHMETIC_OPS and dtype in HALF_DTYPES else dtype
    total = tensors[0].to(total_dtype)
    for tensor in tensors[1:]:
        total = ARITHMETIC_OF[op](total, tensor.to(total_dtype))
    if op == dist.ReduceOp.AVG:
        total = total / len(tensors)
    return total.to(dtype)


def list_reductions() -> list[tuple[Any, torch.dtype]]:
    """Return every operation with every dtype that it supports."""
    reductions = []
    for op in COMBINE_FUNCTIONS:
        reductions += [(op, dtype) for dtype in list_reducible_dtypes(op)]
    return reductions


def assert_reduced(reduced: Tensor, expected: Tensor, label: object) -> None:
    """Compare exactly, or bfloat16 and float16 up to one unit in the last place: float32 rounds their products."""
    if reduced.dtype in HALF_DTYPES:
        torch.testing.assert_close(reduced, expected, rtol=torch.finfo(reduced.dtype).eps, atol=0, msg=str(label))
    else:
        assert torch.equal(reduced, expected), label


def assert_equal_bits(received: Iterable[Tensor], expected: Iterable[Tensor], label: object = None) -> None:
    """Compare tensors by their bytes, because NaN differs from NaN and torch compares no float8."""
    for received_tensor, expected_tensor in zip(received, expected, strict=True):
        assert torch.equal(received_tensor.view(torch.uint8), expected_tensor.view(torch.uint8)), label


def make_group(ranks: list[int], **options: Any) -> dist.ProcessGroup:
    group = dist.new_group(ranks, **options)
    assert isinstance(group, dist.ProcessGroup)
    return group


def require_work(work: dist.Work | None) -> dist.Work:
    """Return the handle of an asynchronous call, which is None for ranks outside the group."""
    assert work is not None
    return work


def assert_times_out(work: dist.Work) -> None:
    try:
        work.wait(datetime.timedelta(seconds=0.02))
    except TimeoutError:
        return
    raise AssertionError("no TimeoutError after the time limit")


def wait_for(works: Iterable[dist.Work | None]) -> None:
    for work in works:
        require_work(work).wait()


# ---- cases


def reductions(world: rendezvous.World) -> None:
    """all_reduce, reduce and reduce_scatter of every dtype and size."""
    for op, dtype in list_reductions():
        for length in SIZES if dtype in (torch.float32, torch.bfloat16) else (1, 1000):
            check_reduce(world, op, dtype, length)
            check_reduce_scatter(world, op, dtype, length)


def check_reduce(world: rendezvous.World, op: Any, dtype: torch.dtype, length: int) -> None:
    inputs = draw_all((length,), dtype)
    expected = reduce_here(inputs, op)
    reduced = inputs[world.rank].clone()
    dist.all_reduce(reduced, op)
    assert_reduced(reduced, expected, ("all_reduce", op, dtype, length))

    root = world.size - 1
    reduced = inputs[world.rank].clone()
    dist.reduce(reduced, root, op)
    assert_reduced(reduced, expected if world.rank == root else inputs[world.rank], ("reduce", op, dtype, length))


def check_reduce_scatter(world: rendezvous.World, op: Any, dtype: torch.dtype, length: int) -> None:
    blocks = draw_all((world.size, length), dtype)
    expected = reduce_here(blocks, op)[world.rank]
    reduced = torch.empty(length, dtype=dtype)
    dist.reduce_scatter(reduced, list(blocks[world.rank]), op)
    assert_reduced(reduced, expected, ("reduce_scatter", op, dtype, length))
    dist.reduce_scatter_tensor(reduced.zero_(), blocks[world.rank], op)
    assert_reduced(reduced, expected, ("reduce_scatter_tensor", op, dtype, length))


def halves_are_added_in_float32(world: rendezvous.World) -> None:
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


def bits_are_equal(world: rendezvous.World) -> None:
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
            assert first_sum.isnan().any() or dtype == torch.int64 or length < 5 or world.size == 1
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


def copies(world: rendezvous.World) -> None:
    """Collectives that do not add, of every dtype and size."""
    rank = world.rank
    root = world.size - 1
    for dtype, length in itertools.product(COPIED_DTYPES, SIZES):
        inputs = [tensor.to(dtype) for tensor in draw_all((length,), torch.uint8)]
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


def all_to_all(world: rendezvous.World) -> None:
    """Equal and unequal rows, lists, and in place."""
    rank = world.rank
    size = world.size
    table = torch.arange(size * size * 3).view(size, size, 3)  # [from, to, 3]
    received = torch.empty(size, 3, dtype=torch.int64)
    dist.all_to_all_single(received, table[rank].contiguous())
    assert torch.equal(received, table[:, rank])
    in_place = table[rank].clone()
    dist.all_to_all_single(in_place, in_place)
    assert torch.equal(in_place, table[:, rank])
    outputs = [torch.empty(3, dtype=torch.int64) for _ in range(size)]
    dist.all_to_all(outputs, list(table[rank]))
    assert torch.equal(torch.stack(outputs), table[:, rank])

    row_counts = list(range(1, size + 1))  # rank n receives n + 1 rows from each rank
    sent = torch.cat([torch.full((target + 1, 2), 10 * rank + target) for target in range(size)])
    received = torch.empty(size * (rank + 1), 2, dtype=sent.dtype)
    dist.all_to_all_single(received, sent, [rank + 1] * size, row_counts)
    expected = [torch.full((rank + 1, 2), 10 * source + rank) for source in range(size)]
    assert torch.equal(received, torch.cat(expected))


def shared_memory_of_arguments(world: rendezvous.World) -> None:
    """Inputs that are slices of outputs, as in FSDP2, and outputs that are slices of inputs."""
    for length in (3, 20_000):
        check_all_gather_from_slice(world, length)
        check_reduce_scatter_into_slice(world, length)
        check_gather_and_scatter_of_slices(world, length)


def check_all_gather_from_slice(world: rendezvous.World, length: int) -> None:
    inputs = draw_all((length,), torch.float32)
    # The second slice belongs to another rank, and is overwritten.
    for position in (world.rank, (world.rank + 1) % world.size):
        output = torch.zeros(world.size, length)
        output[position] = inputs[world.rank]
        dist.all_gather_into_tensor(output.view(-1), output[position])
        assert torch.equal(output, torch.stack(inputs)), length


def check_reduce_scatter_into_slice(world: rendezvous.World, length: int) -> None:
    tables = draw_all((world.size, length), torch.float32)
    expected = reduce_here(tables, dist.ReduceOp.SUM)[world.rank]
    for position in (world.rank, (world.rank + 1) % world.size):
        table = tables[world.rank].clone()
        dist.reduce_scatter_tensor(table[position], table)
        assert torch.equal(table[position], expected), (length, position)


def check_gather_and_scatter_of_slices(world: rendezvous.World, length: int) -> None:
    rank = world.rank
    tables = draw_all((world.size, length), torch.float32)
    for root in range(world.size):
        position = (root + 1) % world.size
        table = tables[rank].clone()
        dist.gather(table[position], list(table) if rank == root else None, root)
        gathered = torch.stack([table_of_rank[position] for table_of_rank in tables])
        assert torch.equal(table, gathered if rank == root else tables[rank])
        table = tables[rank].clone()
        dist.scatter(table[0], list(table) if rank == root else None, root)
        assert torch.equal(table[0], tables[root][rank])


def unusual_tensors(world: rendezvous.World) -> None:
    """Tensors with gaps, without dimensions, of autograd and of inference mode; memory in gaps stays unchanged."""
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


def messages(world: rendezvous.World) -> None:
    """Messages to all ranks at once, with tags in another order, one that comes late, with gaps, and empty ones."""
    if world.size == 1:
        return
    left = (world.rank - 1) % world.size
    right = (world.rank + 1) % world.size
    check_messages_to_all(world)
    check_tags(left, right)
    check_late_message(left, right)

    strided = torch.zeros(5, 2)
    if world.rank % 2 == 0 and right:
        dist.send(torch.arange(5.0)[::1], right)
        dist.send(torch.empty(0), right)
    if world.rank % 2:
        dist.recv(strided[:, 1], left)
        dist.recv(torch.empty(0), left)
        assert torch.equal(strided[:, 1], torch.arange(5.0))
        assert not strided[:, 0].any()
    dist.barrier()


def check_messages_to_all(world: rendezvous.World) -> None:
    """Exchange large messages with all ranks at once, and wait for the sends first."""
    peers = [rank for rank in range(world.size) if rank != world.rank]
    received = {peer: torch.empty(1_000_000) for peer in peers}
    ops = []
    for peer in peers:
        ops.append(dist.P2POp(dist.isend, torch.full((1_000_000,), float(10 * world.rank + peer)), peer))
    for peer in peers:
        ops.append(dist.P2POp(dist.irecv, received[peer], peer))
    wait_for(dist.batch_isend_irecv(ops))
    for peer in peers:
        assert received[peer].eq(10 * peer + world.rank).all()


def check_tags(left: int, right: int) -> None:
    """Receive messages of two tags in another order than they were sent. Messages of a tag keep their order."""
    sends = []
    for number, tag in itertools.product(range(3), (7, 3)):
        sends.append(dist.isend(torch.tensor([tag, number]), right, tag=tag))
    received = {}
    works = {}
    for tag, number in itertools.product((3, 7), range(3)):
        received[tag, number] = torch.zeros(2, dtype=torch.int64)
        works[tag, number] = dist.irecv(received[tag, number], left, tag=tag)
    for tag, number in reversed(received):
        wait_for([works[tag, number]])
        assert received[tag, number].tolist() == [tag, number]
    wait_for(sends)


def check_late_message(left: int, right: int) -> None:
    late_message = torch.zeros(1)
    next_message = torch.zeros(200_000)
    late_work = require_work(dist.irecv(late_message, left, tag=1))
    next_work = dist.irecv(next_message, left, tag=2)
    try:
        late_work.wait(datetime.timedelta(seconds=0.01))
    except TimeoutError:
        wait_for([dist.isend(torch.full((200_000,), 2.0), right, tag=2), next_work])
    assert next_message.eq(2).all(), "a late message does not delay the next one"
    assert late_message.item() == 0
    dist.barrier()
    wait_for([dist.isend(torch.ones(1), right, tag=1), late_work])
    assert late_message.item() == 1


def time_limits(world: rendezvous.World) -> None:
    """Threads that wait with a time limit and without, and a message that no rank receives within the limit."""
    if world.size > 1:
        check_limits_of_threads(world)
        check_limit_of_sender(world)


def check_limits_of_threads(world: rendezvous.World) -> None:
    left = (world.rank - 1) % world.size
    right = (world.rank + 1) % world.size
    limits_exceeded = threading.Barrier(3, timeout=60)

    def wait_twice(work: dist.Work) -> None:
        assert_times_out(work)
        limits_exceeded.wait()
        work.wait(datetime.timedelta(seconds=60))

    received = [torch.zeros(1) for _ in range(3)]
    with concurrent.futures.ThreadPoolExecutor() as threads:
        works = [require_work(dist.irecv(tensor, left, tag=tag)) for tag, tensor in enumerate(received, 20)]
        futures = [threads.submit(wait_twice, work) for work in works[:2]]
        futures.append(threads.submit(lambda: wait_for(works[2:])))
        limits_exceeded.wait()
        dist.barrier()
        wait_for(dist.isend(torch.full((1,), float(tag)), right, tag=tag) for tag in (22, 20, 21))
        for future in futures:
            future.result(timeout=60)
    assert torch.cat(received).tolist() == [20, 21, 22]


def check_limit_of_sender(world: rendezvous.World) -> None:
    assert world.store is not None
    message = torch.ones(4_000_000)  # more than the kernel buffers
    if world.rank == 0:
        work = require_work(dist.isend(message, 1, tag=9))
        assert_times_out(work)
        world.store.set("not taken", "")
        work.wait()
    else:
        world.store.wait(["not taken"])
    if world.rank == 1:
        dist.recv(message.zero_(), 0, tag=9)
        assert message.eq(1).all()
    dist.barrier()


def objects(world: rendezvous.World) -> None:
    """torch's functions for objects, which other programs call."""
    rank = world.rank
    size = world.size
    broadcast: list[Any] = [{"rank": rank}, None]
    dist.broadcast_object_list(broadcast, size - 1)  # noqa: TID251
    assert broadcast == [{"rank": size - 1}, None]
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, ("x" * rank, rank))  # noqa: TID251
    assert gathered == [("x" * source, source) for source in range(size)]
    dist.gather_object(rank, gathered if rank == 0 else None, 0)  # noqa: TID251
    assert rank or gathered == list(range(size))
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, list(range(size)) if rank == 0 else None, 0)  # noqa: TID251
    assert scattered == [rank]
    assert world.broadcast(rank) == 0


def later(world: rendezvous.World) -> None:
    """Asynchronous calls in their order, futures, and callbacks that wait for a later collective."""
    check_order_of_calls(world)
    check_independent_ranks(world)

    first = torch.ones(3)
    second = torch.ones(2)

    def reduce_second(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        work = require_work(dist.all_reduce(second.mul_(future.value()[0][0]), async_op=True))
        return work.get_future().wait()[0]

    work = require_work(dist.all_reduce(first, async_op=True))
    assert work.get_future().then(reduce_second).wait().tolist() == [world.size * world.size] * 2
    barrier = require_work(dist.barrier(async_op=True))
    barrier.wait()
    barrier.get_future().wait()


def check_order_of_calls(world: rendezvous.World) -> None:
    """Call a synchronous collective after asynchronous ones."""
    tensors = [torch.full((100_000,), float(number)) for number in range(6)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    last = torch.ones(1)
    dist.all_reduce(last)
    assert last.item() == world.size
    wait_for(works)
    for number, tensor in enumerate(tensors):
        assert tensor.eq(number * world.size).all()


def check_independent_ranks(world: rendezvous.World) -> None:
    """Rank 0 continues during a collective: rank 1 needs a message from rank 0 before its own call."""
    token = torch.zeros(1)
    tensor = torch.ones(100_000)
    if world.rank == 0 and world.size > 1:
        work = dist.all_reduce(tensor, async_op=True)
        dist.send(token, 1)
        dist.recv(token, 1)
        wait_for([work])
    else:
        if world.rank == 1:
            dist.recv(token, 0)
        dist.all_reduce(tensor)
        if world.rank == 1:
            dist.send(token, 0)
    assert tensor.eq(world.size).all()


def algorithms_by_size(world: rendezvous.World) -> None:
    """A measured algorithm is saved in resolved.yaml, and a later attempt uses the algorithms in this file by size."""
    folder = Path(world.broadcast(tempfile.mkdtemp() if world.is_main else ""))

    def resolve_algorithm(resolved_settings: str) -> str:
        if world.is_main:
            (folder / "config.yaml").write_text("launch:\n  algorithm: auto\nseed: 1\n")
            (folder / "resolved.yaml").write_text(resolved_settings)
        launch = Launch(backend="builtin", algorithm="auto")
        algorithm_choice.set_all_reduce_algorithm(launch, folder, world)
        dist.barrier()
        assert launch.algorithm == "auto"
        assert read_config_file(folder / "config.yaml")["launch.algorithm"] == "auto"
        return str(read_settings(folder)["launch.algorithm"])

    def count_sent() -> int:
        assert dist.group.WORLD is not None
        backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
        return sum(link.bytes_sent for link in backend.communicator.outgoing.values())

    measured = resolve_algorithm("")
    assert measured != "auto"
    assert world.all_gather(measured) == [measured] * world.size
    assert resolve_algorithm("launch.algorithm: star<1000<ring\n") == "star<1000<ring"
    for length, name in ((249, "star"), (250, "ring")):
        before = count_sent()
        tensor = torch.ones(length)
        dist.all_reduce(tensor)
        sent = count_sent() - before
        expected_elements = count_bytes_per_rank(build_algorithm(name, world.size), length)[world.rank]
        assert sent == 4 * expected_elements, name
        assert tensor.eq(world.size).all(), name
    if world.is_main:
        shutil.rmtree(folder)


def groups(world: rendezvous.World) -> None:
    """Subgroups that only their members create, and groups of one rank."""
    rank = world.rank
    half = world.size // 2
    members = list(range(half)) if rank < half else list(range(half, world.size))
    group = make_group(members, use_local_synchronization=True)
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == sum(members)
    dist.broadcast(tensor.fill_(rank), members[-1], group=group)
    assert tensor.item() == members[-1]
    dist.destroy_process_group(group)

    group_of_one = make_group([rank], use_local_synchronization=True)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        dist.all_reduce(tensor.fill_(3), op, group=group_of_one)
        assert tensor.item() == 3


def refusals(world: rendezvous.World) -> None:
    """Unsupported calls raise a clear error before anything is sent, so that the next call works."""
    size = world.size
    fp8 = torch.zeros(2).to(torch.float8_e4m3fn)
    premultiplied: Any = dist._make_nccl_premul_sum(2.0)
    cases: list[tuple[str, Callable[[], object]]] = [
        (
            "does not support the reduction PREMUL_SUM; supported reductions: SUM",
            lambda: dist.all_reduce(torch.zeros(2), premultiplied),
        ),
        (
            "AVG of torch.int64 tensors; use SUM and divide",
            lambda: dist.all_reduce(torch.zeros(2).long(), dist.ReduceOp.AVG),
        ),
        ("BAND of torch.float32", lambda: dist.all_reduce(torch.zeros(2), dist.ReduceOp.BAND)),
        ("SUM of torch.float8_e4m3fn", lambda: dist.reduce(fp8, 0)),
        ("receiving from any rank", lambda: dist.recv(torch.zeros(2))),
        ("sparse", lambda: dist.all_reduce(torch.zeros(2).to_sparse())),
        ("must be contiguous", lambda: dist.all_gather_into_tensor(torch.zeros(size + 1), torch.zeros(1))),
        ("do not match", lambda: dist.all_gather([torch.zeros(2)] * size, torch.zeros(3))),
        ("does not support", lambda: dist.gather_into_tensor(torch.zeros(size), torch.zeros(1))),
    ]
    if size > 1:
        uneven = torch.zeros(size + 1)
        cases.append(("cannot be divided equally", lambda: dist.all_to_all_single(uneven, uneven)))
    for message, call in cases:
        try:
            call()
        except Exception as error:
            assert message in str(error), (message, str(error))
        else:
            raise AssertionError(f"not refused: {message}")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size


CASES: dict[str, Callable[[rendezvous.World], None]] = {
    case.__name__: case
    for case in (
        reductions, halves_are_added_in_float32, bits_are_equal, copies, all_to_all, shared_memory_of_arguments,
        unusual_tensors, messages, time_limits, objects, later, algorithms_by_size, groups, refusals,
    )
}  # fmt: skip


def main(count: str, transport: Any, *names: str) -> int:
    cases = dict(CASES)
    if not names or not cases.keys() >= set(names):
        from tests.harness.ranks.torch_features import CASES as FEATURE_CASES  # takes seconds to import

        cases |= {case.__name__: case for case in FEATURE_CASES}
    executed_names = names or [name for name in cases if name != "ddp"]

    def execute_cases(rank_info: RankInfo) -> None:
        with rendezvous.join_world(rank_info, dataclasses.replace(SETTINGS, transport=transport)) as world:
            assert world.backend == "builtin"
            assert dist.get_backend() == "builtin"
            for name in executed_names:
                torch.manual_seed(0)
                cases[name](world)

    return local_launcher.run_ranks(execute_cases, int(count), 1, lambda: None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
