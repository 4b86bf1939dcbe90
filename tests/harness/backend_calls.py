"""Collectives of the backend `builtin` beside gloo's and beside arithmetic, for test_process_group.py.

    python -m tests.harness.backend_calls RANKS TRANSPORT [CASE ...]      the ranks do the cases, or all but `ddp`

Every rank knows what the others hold, and so what must come out.
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
SIZES = (0, 1, 2, 7, 1000, 40_001)  # fewer than ranks, no multiple of them, more than is sent at once
ARITHMETIC_OF: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add, dist.ReduceOp.AVG: torch.add, dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or, dist.ReduceOp.BXOR: torch.bitwise_xor,
}  # fmt: skip
COPIED = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn)


def draw(rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What a rank holds: small whole numbers, but for halves that bfloat16 and float16 could not add up exactly."""
    source = torch.Generator().manual_seed(100 * rank + sum(shape))
    if dtype in (torch.bfloat16, torch.float16):
        return torch.rand(*shape, generator=source).to(dtype)
    high = 2 if dtype == torch.bool else 4
    values = torch.randint(0 if dtype in INTEGER_DTYPES else -3, high, shape, generator=source).to(dtype)
    return values * (1 + 2j) if dtype in COMPLEX_DTYPES else values


def draw_all(shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    return [draw(rank, shape, dtype) for rank in range(dist.get_world_size())]


def reduce_here(values: Sequence[Tensor], op: Any) -> Tensor:
    """The reduction by arithmetic; halves in float32, rounded once."""
    dtype, size = values[0].dtype, len(values)
    if dtype in COMPLEX_DTYPES:  # as torch does it
        return torch.view_as_complex(reduce_here([torch.view_as_real(value) for value in values], op))
    wide = torch.float32 if op in ARITHMETIC_OPS and dtype in (torch.bfloat16, torch.float16) else dtype
    total = values[0].to(wide)
    for value in values[1:]:
        total = ARITHMETIC_OF[op](total, value.to(wide))
    return (total / size if op == dist.ReduceOp.AVG else total).to(dtype)


def list_reductions() -> list[tuple[Any, torch.dtype]]:
    """Every operation with every type that it takes."""
    return [(op, dtype) for op in COMBINE_FUNCTIONS for dtype in list_reducible_dtypes(op)]


def agree(found: Tensor, expected: Tensor, what: object) -> None:
    """Equal; products of halves to one unit in the last place, since float32 does not hold them exactly."""
    if found.dtype in (torch.bfloat16, torch.float16):
        torch.testing.assert_close(found, expected, rtol=torch.finfo(found.dtype).eps, atol=0, msg=str(what))
    else:
        assert torch.equal(found, expected), what


def make_group(ranks: list[int], **options: Any) -> dist.ProcessGroup:
    group = dist.new_group(ranks, **options)
    assert isinstance(group, dist.ProcessGroup)
    return group


def begin(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


def fail_in_time(work: dist.Work) -> None:
    try:
        work.wait(datetime.timedelta(seconds=0.02))
    except TimeoutError:
        return
    raise AssertionError("the time limit was not kept")


def wait_for(works: Iterable[dist.Work | None]) -> None:
    for work in works:
        assert work is not None
        work.wait()


# ---- cases


def reductions(world: rendezvous.World) -> None:
    """all_reduce, reduce and reduce_scatter of every type and size."""
    for op, dtype in list_reductions():
        check_reductions(world, op, dtype, SIZES if dtype in (torch.float32, torch.bfloat16) else (1, 1000))


def check_reductions(world: rendezvous.World, op: Any, dtype: torch.dtype, sizes: Sequence[int]) -> None:
    for length in sizes:
        values, what = draw_all((length,), dtype), (op, dtype, length)
        expected = reduce_here(values, op)
        found = values[world.rank].clone()
        dist.all_reduce(found, op)
        agree(found, expected, ("all_reduce", *what))
        found = values[world.rank].clone()
        dist.reduce(found, world.size - 1, op)
        agree(found, expected if world.rank == world.size - 1 else values[world.rank], ("reduce", *what))
        blocks = draw_all((world.size, length), dtype)
        found = torch.empty(length, dtype=dtype)
        dist.reduce_scatter(found, list(blocks[world.rank]), op)
        agree(found, reduce_here(blocks, op)[world.rank], ("reduce_scatter", *what))
        dist.reduce_scatter_tensor(found.zero_(), blocks[world.rank], op)
        agree(found, reduce_here(blocks, op)[world.rank], ("reduce_scatter_tensor", *what))


def halves_are_added_in_float32(world: rendezvous.World) -> None:
    """Sums of numbers whose exact sum float32 holds: rounded once, not at each addition."""
    for dtype in (torch.bfloat16, torch.float16):
        values = [torch.full((50,), 1.0 + rank / 64, dtype=dtype) for rank in range(world.size)]
        values[0] += 96
        exact = torch.stack(values).double().sum(0).to(dtype)
        found = values[world.rank].clone()
        dist.all_reduce(found)
        assert torch.equal(found, exact), dtype
        scattered = torch.empty(50, dtype=dtype)
        dist.reduce_scatter(scattered, [values[world.rank]] * world.size)
        assert torch.equal(scattered, exact), dtype


def bits_are_equal(world: rendezvous.World) -> None:
    """Of every algorithm and type on all ranks and in a repetition, NaN and inf among them."""
    every, types = list(range(world.size)), (torch.float64, torch.float32, torch.bfloat16, torch.int64)
    gloo = make_group(every, backend="gloo")
    transport = setup.make_transport_settings(
        RankInfo(size=world.size, local_size=world.size), SETTINGS, world.hosts, "lo"
    )
    for name in ALGORITHM_NAMES:
        torch_registration.register_backend(dataclasses.replace(transport, run="bits", algorithm=name))
        group = make_group(every, backend="builtin")
        for dtype, length in itertools.product(types, (1, 5, 30_001)):
            source = torch.Generator().manual_seed(world.rank)
            value = torch.randn(length, dtype=torch.float64, generator=source).to(dtype)
            if dtype.is_floating_point:
                value[length // 2 :: 7] = float("nan") if world.rank % 2 else float("inf")
                value[length // 3 :: 11] = float("-inf")
            results = [value.clone() for _ in range(2)]
            for result in results:
                dist.all_reduce(result, group=group)
            raw = [result.view(torch.uint8) for result in results]
            assert torch.equal(*raw), (name, dtype, length, "repeated")
            seen = [torch.empty_like(raw[0]) for _ in every]
            dist.all_gather(seen, raw[0], group=gloo)
            assert all(torch.equal(one, seen[0]) for one in seen), (name, dtype, length)
            assert results[0].isnan().any() or dtype == torch.int64 or length < 5 or world.size == 1
        dist.destroy_process_group(group)
    torch_registration.register_backend(transport)


def copies(world: rendezvous.World) -> None:
    """Everything that adds nothing, of every type and size."""
    rank, size = world.rank, world.size
    for dtype, length in itertools.product(COPIED, SIZES):
        values = [value.to(dtype) for value in draw_all((length,), torch.uint8)]
        raw = [value.view(torch.uint8) for value in values]
        root = size - 1
        found = values[rank].clone()
        dist.broadcast(found, root)
        assert torch.equal(found.view(torch.uint8), raw[root]), ("broadcast", dtype, length)
        outputs = [torch.empty_like(found) for _ in range(size)]
        dist.all_gather(outputs, values[rank])
        assert all(torch.equal(a.view(torch.uint8), b) for a, b in zip(outputs, raw, strict=True)), "all_gather"
        whole = torch.empty(size * length, dtype=dtype)
        dist.all_gather_into_tensor(whole, values[rank])
        assert torch.equal(whole.view(torch.uint8), torch.cat(raw)), "all_gather_into_tensor"
        outputs = [torch.empty_like(found) for _ in range(size)]
        dist.gather(values[rank], outputs if rank == root else None, root)
        assert rank != root or all(torch.equal(a.view(torch.uint8), b) for a, b in zip(outputs, raw, strict=True))
        dist.scatter(found, values if rank == root else None, root)
        assert torch.equal(found.view(torch.uint8), raw[rank]), "scatter"
        dist.barrier()


def all_to_all(world: rendezvous.World) -> None:
    """Equal and unequal rows, lists, and in place."""
    rank, size = world.rank, world.size
    table = torch.arange(size * size * 3).view(size, size, 3)  # [from, to, 3]
    found = torch.empty(size, 3, dtype=torch.int64)
    dist.all_to_all_single(found, table[rank].contiguous())
    assert torch.equal(found, table[:, rank])
    place = table[rank].clone()
    dist.all_to_all_single(place, place)
    assert torch.equal(place, table[:, rank])
    outputs = [torch.empty(3, dtype=torch.int64) for _ in range(size)]
    dist.all_to_all(outputs, list(table[rank]))
    assert torch.equal(torch.stack(outputs), table[:, rank])
    rows = [to + 1 for to in range(size)]  # to each rank as many as it has come
    given = torch.cat([torch.full((count, 2), 10 * rank + to) for to, count in enumerate(rows)])
    found = torch.empty(size * (rank + 1), 2, dtype=given.dtype)
    dist.all_to_all_single(found, given, [rank + 1] * size, rows)
    assert torch.equal(found, torch.cat([torch.full((rank + 1, 2), 10 * source + rank) for source in range(size)]))


def shared_memory_of_arguments(world: rendezvous.World) -> None:
    """Inputs that are slices of outputs, as FSDP2 has them, and the other way round."""
    rank, size = world.rank, world.size
    for length in (3, 20_000):
        values = draw_all((length,), torch.float32)
        whole = torch.zeros(size * length)
        own = whole[rank * length : (rank + 1) * length]
        own.copy_(values[rank])
        dist.all_gather_into_tensor(whole, own)
        assert torch.equal(whole, torch.cat(values)), length
        whole = torch.zeros(size * length)
        other = whole[(rank + 1) % size * length :][:length]  # what is about to be overwritten
        other.copy_(values[rank])
        dist.all_gather_into_tensor(whole, other)
        assert torch.equal(whole, torch.cat(values)), length
        tables = draw_all((size, length), torch.float32)
        for position in (rank, (rank + 1) % size):
            table = tables[rank].clone()
            dist.reduce_scatter_tensor(table[position], table)
            assert torch.equal(table[position], reduce_here(tables, dist.ReduceOp.SUM)[rank]), (length, position)
        for root in range(size):
            table = tables[rank].clone()
            dist.gather(table[(root + 1) % size], list(table) if rank == root else None, root)
            expected = torch.stack([one[(root + 1) % size] for one in tables])
            assert torch.equal(table, expected if rank == root else tables[rank])
            table = tables[rank].clone()
            dist.scatter(table[0], list(table) if rank == root else None, root)
            assert torch.equal(table[0], tables[root][rank])


def unusual_tensors(world: rendezvous.World) -> None:
    """With gaps, without dimensions, of autograd, of inference, conjugated; and what must stay as it was."""
    rank, size = world.rank, world.size
    total = size * (size + 1) / 2
    base = torch.zeros(4, 6)
    base[:, ::2] = rank + 1
    dist.all_reduce(base[:, ::2])
    assert torch.equal(base[:, ::2], torch.full((4, 3), total)) and not base[:, 1::2].any()
    dist.all_reduce(base.t())
    single = torch.tensor(float(rank + 1))
    dist.all_reduce(single)
    assert single.item() == total
    parameter = torch.nn.Parameter(torch.full((3,), float(rank + 1)))
    before = parameter._version
    dist.all_reduce(parameter)
    dist.broadcast(parameter, 0)
    assert parameter.detach().eq(total).all() and parameter._version == before
    with torch.inference_mode():
        frozen, gaps = torch.full((2, 3), float(rank + 1)), torch.full((3, 2), float(rank + 1)).t()
    for tensor in (frozen, gaps):
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        assert tensor.eq(total).all()
    gathered = torch.empty(size, 2, 3)
    dist.all_gather(list(gathered.transpose(1, 2)), torch.full((3, 2), float(rank)))
    assert torch.equal(gathered[:, 0, 0], torch.arange(float(size)))


def messages(world: rendezvous.World) -> None:
    """To all at once, sends waited for first; with tags in another order; in the order of sending; empty ones."""
    rank, size = world.rank, world.size
    if size == 1:
        return
    others = [other for other in range(size) if other != rank]
    large = {other: torch.full((1_000_000,), float(10 * rank + other)) for other in others}
    found = {other: torch.empty(1_000_000) for other in others}
    ops = [dist.P2POp(dist.isend, large[other], other) for other in others]
    ops += [dist.P2POp(dist.irecv, found[other], other) for other in others]
    wait_for(dist.batch_isend_irecv(ops))  # the sends first
    assert all(found[other].eq(10 * other + rank).all() for other in others)
    right, left = (rank + 1) % size, (rank - 1) % size
    sends = [dist.isend(torch.tensor([tag, number]), right, tag=tag) for number in range(3) for tag in (7, 3)]
    pairs = {(tag, number): torch.zeros(2, dtype=torch.int64) for tag in (3, 7) for number in range(3)}
    arriving = {key: dist.irecv(value, left, tag=key[0]) for key, value in pairs.items()}
    for key in reversed(pairs):
        wait_for([arriving[key]])
        assert pairs[key].tolist() == list(key)
    wait_for(sends)
    later, sooner = torch.zeros(1), torch.zeros(200_000)
    first, second = (dist.irecv(value, left, tag=tag) for tag, value in ((1, later), (2, sooner)))
    assert first is not None
    try:
        first.wait(datetime.timedelta(seconds=0.01))
    except TimeoutError:
        wait_for([dist.isend(torch.full((200_000,), 2.0), right, tag=2), second])
    assert sooner.eq(2).all() and later.item() == 0, "a message that does not come holds no other one up"
    dist.barrier()
    wait_for([dist.isend(torch.ones(1), right, tag=1), first])
    assert later.item() == 1
    strided = torch.zeros(5, 2)
    if rank % 2 == 0 and right:
        dist.send(torch.arange(5.0)[::1], right)
        dist.send(torch.empty(0), right)
    if rank % 2:
        dist.recv(strided[:, 1], left)
        dist.recv(torch.empty(0), left)
        assert torch.equal(strided[:, 1], torch.arange(5.0)) and not strided[:, 0].any()
    dist.barrier()


def time_limits(world: rendezvous.World) -> None:
    """Of messages that several threads wait for, with a limit and without, and of one that nobody takes."""
    rank, size = world.rank, world.size
    if size == 1:
        return
    right, left, late = (rank + 1) % size, (rank - 1) % size, threading.Barrier(3, timeout=60)

    def wait_twice(work: dist.Work) -> None:
        fail_in_time(work)
        late.wait()
        work.wait(datetime.timedelta(seconds=60))

    found = [torch.zeros(1) for _ in range(3)]
    with concurrent.futures.ThreadPoolExecutor() as threads:
        works = [begin(dist.irecv(value, left, tag=tag)) for tag, value in enumerate(found, 20)]
        waiting = [threads.submit(wait_twice, work) for work in works[:2]]
        waiting.append(threads.submit(lambda: wait_for(works[2:])))
        late.wait()
        dist.barrier()
        wait_for(dist.isend(torch.full((1,), float(tag)), right, tag=tag) for tag in (22, 20, 21))
        for one in waiting:
            one.result(timeout=60)
    assert [value.item() for value in found] == [20, 21, 22]
    assert world.store is not None
    huge = torch.ones(4_000_000)  # more than a kernel stores
    if rank == 0:
        sending = begin(dist.isend(huge, 1, tag=9))
        fail_in_time(sending)
        world.store.set("not taken", "")
        sending.wait()
    else:
        world.store.wait(["not taken"])
    if rank == 1:
        dist.recv(huge.zero_(), 0, tag=9)
        assert huge.eq(1).all()
    dist.barrier()


def objects(world: rendezvous.World) -> None:
    """Torch's own, which other people's programs call."""
    rank, size = world.rank, world.size
    box: list[Any] = [{"rank": rank}, None]
    dist.broadcast_object_list(box, size - 1)  # noqa: TID251
    assert box == [{"rank": size - 1}, None]
    found: list[Any] = [None] * size
    dist.all_gather_object(found, ("x" * rank, rank))  # noqa: TID251
    assert found == [("x" * other, other) for other in range(size)]
    dist.gather_object(rank, found if rank == 0 else None, 0)  # noqa: TID251
    assert rank or found == list(range(size))
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, list(range(size)) if rank == 0 else None, 0)  # noqa: TID251
    assert mine == [rank] and world.broadcast(rank) == 0


def later(world: rendezvous.World) -> None:
    """Asynchronous calls in their order, futures and their callbacks, which may wait for a later collective."""
    size = world.size
    values = [torch.full((100_000,), float(number)) for number in range(6)]
    works = [dist.all_reduce(value, async_op=True) for value in values]
    single = torch.ones(1)
    dist.all_reduce(single)  # behind the others
    assert single.item() == size
    for number, (work, value) in enumerate(zip(works, values, strict=True)):
        assert work is not None
        work.wait()
        assert value.eq(number * size).all()
    token, value = torch.zeros(1), torch.ones(100_000)
    if world.rank == 0 and size > 1:  # goes on while the others have not begun, and need it to go on
        work = dist.all_reduce(value, async_op=True)
        dist.send(token, 1)
        dist.recv(token, 1)
        wait_for([work])
    else:
        if world.rank == 1:
            dist.recv(token, 0)
        dist.all_reduce(value)
        if world.rank == 1:
            dist.send(token, 0)
    assert value.eq(size).all()
    first, second = torch.ones(3), torch.ones(2)
    begun = dist.all_reduce(first, async_op=True)
    assert begun is not None

    def go_on(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        nested = dist.all_reduce(second.mul_(future.value()[0][0]), async_op=True)
        assert nested is not None
        return nested.get_future().wait()[0]

    assert begun.get_future().then(go_on).wait().tolist() == [size * size] * 2
    done = dist.barrier(async_op=True)
    assert done is not None
    done.wait()
    done.get_future().wait()


def algorithms_by_size(world: rendezvous.World) -> None:
    """What was measured stands in resolved.yaml, and what stands there is taken by a later attempt, by size."""
    folder = Path(world.broadcast(tempfile.mkdtemp() if world.is_main else ""))

    def settle(text: str) -> str:
        if world.is_main:
            (folder / "config.yaml").write_text("launch:\n  algorithm: auto\nseed: 1\n")
            (folder / "resolved.yaml").write_text(text)
        launch = Launch(backend="builtin", algorithm="auto")
        algorithm_choice.set_all_reduce_algorithm(launch, folder, world)
        dist.barrier()
        assert launch.algorithm == "auto" == read_config_file(folder / "config.yaml")["launch.algorithm"]
        return str(read_settings(folder)["launch.algorithm"])

    def count_sent() -> int:
        assert dist.group.WORLD is not None
        backend: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
        return sum(link.bytes_sent for link in backend.communicator.outgoing.values())

    chosen = settle("")
    assert chosen != "auto" and world.all_gather(chosen) == [chosen] * world.size
    assert settle("launch.algorithm: star<1000<ring\n") == "star<1000<ring"
    for length, name in ((249, "star"), (250, "ring")):
        before, value = count_sent(), torch.ones(length)
        dist.all_reduce(value)
        played = build_algorithm(name, world.size)
        assert (
            count_sent() - before == 4 * count_bytes_per_rank(played, length)[world.rank] and value.eq(world.size).all()
        ), name
    if world.is_main:
        shutil.rmtree(folder)


def groups(world: rendezvous.World) -> None:
    """Subgroups that only their members make, one of a single rank among them."""
    rank, size = world.rank, world.size
    halves = [list(range(size // 2)), list(range(size // 2, size))]
    mine = halves[rank >= size // 2]
    group = make_group(mine, use_local_synchronization=True)
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=group)
    assert value.item() == sum(mine)
    dist.broadcast(value.fill_(rank), mine[-1], group=group)
    assert value.item() == mine[-1]
    dist.destroy_process_group(group)
    alone = make_group([rank], use_local_synchronization=True)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        dist.all_reduce(value.fill_(3), op, group=alone)
        assert value.item() == 3


def refusals(world: rendezvous.World) -> None:
    """One clear error before anything is sent: what comes next works."""
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
    for words, call in cases:
        try:
            call()
        except Exception as error:
            assert words in str(error), (words, str(error))
        else:
            raise AssertionError(f"not refused: {words}")
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == size


CASES: dict[str, Callable[[rendezvous.World], None]] = {
    case.__name__: case
    for case in (
        reductions, halves_are_added_in_float32, bits_are_equal, copies, all_to_all, shared_memory_of_arguments,
        unusual_tensors, messages, time_limits, objects, later, algorithms_by_size, groups, refusals,
    )
}  # fmt: skip


def main(count: str, transport: Any, *names: str) -> int:
    def body(place: RankInfo) -> None:
        with rendezvous.join_world(place, dataclasses.replace(SETTINGS, transport=transport)) as world:
            assert world.backend == "builtin" == dist.get_backend()
            for name in names or cases:
                torch.manual_seed(0)
                cases[name](world)

    cases = dict(CASES)
    if not cases.keys() >= set(names) or not names:
        from tests.harness.torch_features import CASES as MORE  # seconds to import

        cases |= {case.__name__: case for case in MORE if names or case.__name__ != "ddp"}
    return local_launcher.run_ranks(body, int(count), 1, lambda: None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
