"""Cases of backend_calls.py: messages between two ranks, time limits, and asynchronous calls."""

from __future__ import annotations

import concurrent.futures
import datetime
import itertools
import threading
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from common.ranks.rendezvous import World


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


def check_messages(world: World) -> None:
    """Messages to all ranks at once, received in another order, late, into tensors with gaps, and empty ones."""
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


def check_messages_to_all(world: World) -> None:
    """Exchange large messages with all ranks at once, and wait for the sends first."""
    peers = [rank for rank in range(world.size) if rank != world.rank]
    received = {peer: torch.empty(1_000_000) for peer in peers}
    ops = []
    for peer in peers:
        message = torch.full((1_000_000,), float(10 * world.rank + peer))
        ops.append(dist.P2POp(dist.isend, message, peer))
    for peer in peers:
        ops.append(dist.P2POp(dist.irecv, received[peer], peer))
    wait_for_all(dist.batch_isend_irecv(ops))
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
        wait_for_all([works[tag, number]])
        assert received[tag, number].tolist() == [tag, number]
    wait_for_all(sends)


def check_late_message(left: int, right: int) -> None:
    late_message = torch.zeros(1)
    next_message = torch.zeros(200_000)
    late_work = require_work(dist.irecv(late_message, left, tag=1))
    next_work = dist.irecv(next_message, left, tag=2)
    assert_times_out(late_work)
    wait_for_all([dist.isend(torch.full((200_000,), 2.0), right, tag=2), next_work])
    assert next_message.eq(2).all(), "a late message does not delay the next one"
    assert late_message.item() == 0
    dist.barrier()
    wait_for_all([dist.isend(torch.ones(1), right, tag=1), late_work])
    assert late_message.item() == 1


def check_time_limits(world: World) -> None:
    """Threads that wait with a time limit and without, and a message that no rank receives within the limit."""
    if world.size > 1:
        check_limits_in_threads(world)
        check_limit_of_send(world)


def check_limits_in_threads(world: World) -> None:
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
        futures.append(threads.submit(lambda: wait_for_all(works[2:])))
        limits_exceeded.wait()
        dist.barrier()
        messages = {tag: torch.full((1,), float(tag)) for tag in (22, 20, 21)}
        wait_for_all(dist.isend(message, right, tag=tag) for tag, message in messages.items())
        for future in futures:
            future.result(timeout=60)
    assert torch.cat(received).tolist() == [20, 21, 22]


def check_limit_of_send(world: World) -> None:
    assert world.store is not None
    message = torch.ones(4_000_000)  # more than the kernel buffers
    if world.rank == 0:
        work = require_work(dist.isend(message, 1, tag=9))
        assert_times_out(work)
        world.store.set("send timed out", "")
        work.wait()
    else:
        world.store.wait(["send timed out"])
    if world.rank == 1:
        dist.recv(message.zero_(), 0, tag=9)
        assert message.eq(1).all()
    dist.barrier()


def check_asynchronous_calls(world: World) -> None:
    """Order of asynchronous calls, futures, and callbacks that wait for a later collective."""
    check_order_of_calls(world)
    check_independent_ranks(world)

    first = torch.ones(3)
    second = torch.ones(2)

    def reduce_second(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        reduced_first = future.value()[0]
        second.mul_(reduced_first[0])
        work = require_work(dist.all_reduce(second, async_op=True))
        return work.get_future().wait()[0]

    work = require_work(dist.all_reduce(first, async_op=True))
    reduced_second = work.get_future().then(reduce_second).wait()
    assert reduced_second.tolist() == [world.size * world.size] * 2
    barrier = require_work(dist.barrier(async_op=True))
    barrier.wait()
    barrier.get_future().wait()


def check_order_of_calls(world: World) -> None:
    """Call a synchronous collective after asynchronous ones."""
    tensors = [torch.full((100_000,), float(number)) for number in range(6)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    last = torch.ones(1)
    dist.all_reduce(last)
    assert last.item() == world.size
    wait_for_all(works)
    for number, tensor in enumerate(tensors):
        assert tensor.eq(number * world.size).all()


def check_independent_ranks(world: World) -> None:
    """Rank 0 continues during a collective: rank 1 needs a message from rank 0 before its own call."""
    token = torch.zeros(1)
    tensor = torch.ones(100_000)
    if world.rank == 0 and world.size > 1:
        work = dist.all_reduce(tensor, async_op=True)
        dist.send(token, 1)
        dist.recv(token, 1)
        wait_for_all([work])
    else:
        if world.rank == 1:
            dist.recv(token, 0)
        dist.all_reduce(tensor)
        if world.rank == 1:
            dist.send(token, 0)
    assert tensor.eq(world.size).all()
