"""Count the bytes of each collective, and of messages that other threads send, on three ranks.

python -m tests.harness.ranks.sent_messages
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from common.ranks.rendezvous import World
from common.training.message_counter import MessageCounter
from configs.shared import Launch
from tests.harness.ranks.programs import run_on_ranks

RANKS = 3
NUMBERS = 1000
BYTES = 4 * NUMBERS
RING = (RANKS - 1) / RANKS
MATRIX = (120, 12)
MATRIX_RANK = 2


def count_bytes(call: Callable[[], object]) -> float:
    with MessageCounter() as counter:
        call()
    sent_bytes = counter.sent_bytes
    call()
    assert counter.sent_bytes == sent_bytes, "nothing is counted after the context"
    return sent_bytes


def count_each_collective(world: World) -> None:
    x = torch.ones(NUMBERS)
    shards = [torch.ones(NUMBERS) for _ in range(RANKS)]
    joined = torch.ones(RANKS * NUMBERS)
    on_root = shards if world.is_main else None
    of_one_tensor: list[Callable[[], object]] = [
        lambda: dist.broadcast(x, 1),
        lambda: dist.reduce(x, 1),
        lambda: dist.gather(x, on_root),
        lambda: dist.scatter(x, on_root),
    ]
    of_all_tensors: list[Callable[[], object]] = [
        lambda: dist.all_gather(shards, x),
        lambda: dist.all_gather_into_tensor(joined, x),
        lambda: dist.reduce_scatter(x, shards),
        lambda: dist.reduce_scatter_tensor(x, joined),
        lambda: dist.all_to_all(list(joined.clone().chunk(RANKS)), shards),
        lambda: dist.all_to_all_single(joined.clone(), joined),
    ]
    for collectives, size in ((of_one_tensor, BYTES), (of_all_tensors, RANKS * BYTES)):
        for number, collective in enumerate(collectives):
            assert count_bytes(collective) == RING * size, number
    assert count_bytes(lambda: dist.all_reduce(x)) == 2 * RING * BYTES
    assert count_bytes(lambda: send_to_next(world)) == BYTES


def send_to_next(world: World) -> None:
    sending = dist.isend(torch.ones(NUMBERS), (world.rank + 1) % RANKS)
    dist.recv(torch.empty(NUMBERS), (world.rank - 1) % RANKS)
    assert sending is not None
    sending.wait()


def count_in_other_threads(world: World) -> None:
    def reduce_in_thread() -> None:
        thread = threading.Thread(target=dist.all_reduce, args=[torch.ones(NUMBERS)])
        thread.start()
        thread.join()

    assert count_bytes(reduce_in_thread) == 2 * RING * BYTES


def count_powersgd(world: World) -> None:
    """Count the third step, in which callbacks of PowerSGD send one of the matrices from another thread."""
    rows, columns = MATRIX
    model = DistributedDataParallel(nn.Linear(columns, rows))
    state = powerSGD_hook.PowerSGDState(None, MATRIX_RANK, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def take_step() -> None:
        model(torch.ones(1, columns)).sum().backward()

    uncompressed = rows * columns + rows
    compressed = MATRIX_RANK * (rows + columns) + rows
    sent = []
    for _ in range(3):
        with MessageCounter() as counter:
            take_step()
        sent.append(counter.sent_bytes / (2 * RING * 4))
    assert (sent[0], sent[2]) == (uncompressed, compressed), sent


def count_all(world: World) -> None:
    count_each_collective(world)
    count_in_other_threads(world)
    count_powersgd(world)


if __name__ == "__main__":
    sys.exit(run_on_ranks(count_all, RANKS, Launch(device="cpu")))
