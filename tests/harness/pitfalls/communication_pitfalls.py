"""Mistakes with communication on four ranks."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common.ranks.rendezvous import World
from tests.harness.pitfalls.outcomes import collect_from_ranks, record_outcome

RANKS = 4
EXCHANGES = 20
STEPS = 5
LEARNING_RATE = 0.1
ELEMENTS = 1 << 18  # 1 MB of float32
STEP_TIMEOUT = 120.0  # seconds, of operations that succeed
BLOCKED_TIMEOUT = 0.5  # seconds, of operations that block


def get_neighbors() -> tuple[int, int]:
    """Return the left and the right neighbor in the ring."""
    return (dist.get_rank() - 1) % RANKS, (dist.get_rank() + 1) % RANKS


def exchange_in_ring(outgoing: Tensor, incoming: Tensor) -> None:
    """Send to the right neighbor and receive from the left one at the same time."""
    left, right = get_neighbors()
    request = dist.isend(outgoing, right)
    dist.recv(incoming, left)
    assert request is not None
    request.wait()


# ---- all-gather


def all_gather(tensor: Any) -> Any:
    """The mistake: this function shadows torch's all_gather, which was imported by name."""
    gathered: list[Any] = [None] * dist.get_world_size()
    all_gather(gathered)  # a second mistake: the tensor is not passed
    return gathered


def shadowed_all_gather(world: World) -> Any:
    """Show the mistakes of `all_gather` one after another."""
    x = torch.tensor([float(world.rank)])
    torch_all_gather: Any = dist.all_gather
    repeated_output = [torch.empty(1)] * RANKS
    torch_all_gather(repeated_output, x)
    outputs = [torch.empty(1) for _ in range(RANKS)]
    torch_all_gather(outputs, x)
    return {
        "shadowed": record_outcome(lambda: all_gather(x)),
        "without input": record_outcome(lambda: torch_all_gather([None] * RANKS)),
        "None as output": record_outcome(lambda: torch_all_gather([None] * RANKS, x)),
        "one output repeated": torch.cat(repeated_output).tolist(),
        "correct": torch.cat(outputs).tolist(),
    }


# ---- ring all-reduce


def reduce_as_old_tutorial(send: Tensor, recv: Tensor, maxima: list[float]) -> None:
    """The ring all-reduce of the old tutorial (pytorch#31572); `maxima` gets the maximum of each received buffer."""
    send_buff = torch.zeros(send.size())
    recv_buff = torch.zeros(send.size())
    accum = send.clone()
    for i in range(RANKS - 1):
        if i % 2 == 0:
            exchange_in_ring(send_buff, recv_buff)
            accum += recv  # an argument, not the buffer that was received into
            maxima.append(recv_buff.abs().max().item())
        else:
            exchange_in_ring(recv_buff, send_buff)
            accum += send
            maxima.append(send_buff.abs().max().item())
    recv[:] = accum


def reduce_as_new_tutorial(send: Tensor, recv: Tensor) -> None:
    """The ring all-reduce of the corrected tutorial, which sends full tensors."""
    send_buff = send.clone()
    recv_buff = send.clone()
    accum = send.clone()
    for i in range(RANKS - 1):
        if i % 2 == 0:
            exchange_in_ring(send_buff, recv_buff)
            accum += recv_buff
        else:
            exchange_in_ring(recv_buff, send_buff)
            accum += send_buff
    recv[:] = accum


def count_received_bytes() -> int:
    """Return the bytes received over TCP so far, from the kernel: tcpi_bytes_received in linux/tcp.h."""
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, or not TCP
            if str(path.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as connection:
                    tcp_info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    count += struct.unpack_from("Q", tcp_info, 128)[0]
    return count


def ring_all_reduces(world: World) -> Any:
    """Return the sum that each ring computes, and the received bytes as a multiple of the tensor's bytes."""
    x = torch.full((ELEMENTS,), world.rank + 1.0)
    maxima: list[float] = []

    def measure(ring: Callable[[Tensor, Tensor], object]) -> Any:
        total = torch.zeros_like(x)
        dist.barrier()
        bytes_before = count_received_bytes()
        ring(x, total)
        received_bytes = count_received_bytes() - bytes_before
        return {"sum": total.unique().tolist(), "relative_bytes": received_bytes / x.nbytes}

    return {
        "old tutorial": measure(lambda send, recv: reduce_as_old_tutorial(send, recv, maxima)),
        "received maxima of old tutorial": maxima,
        "new tutorial": measure(reduce_as_new_tutorial),
        "correct": measure(lambda send, recv: dist.all_reduce(recv.copy_(send))),
    }


# ---- sending


def blocking_sends(world: World) -> Any:
    """The mistake: every rank sends to the right before it receives from the left."""
    left, right = get_neighbors()
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)

    def send_first() -> None:
        limit = datetime.timedelta(seconds=BLOCKED_TIMEOUT)
        group.send([torch.ones(1)], right, 0).wait(limit)  # dist.send of one number, with a time limit
        group.recv([torch.empty(1)], left, 0).wait()

    def exchange(count: int) -> Any:
        received = torch.empty(count)
        exchange_in_ring(torch.full((count,), float(world.rank)), received)
        return received.unique().tolist()

    exchanged = [exchange(count) for count in (1, ELEMENTS)]
    dist.barrier()
    return {"mistake": record_outcome(send_first), "correct": exchanged}


def blocking_sockets(world: World) -> Any:
    """The same mistake over custom sockets with buffers of about 10 kB: with a small and a large message."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as to_right:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        to_right.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        ports = torch.empty(RANKS, dtype=torch.int64)
        dist.all_gather_into_tensor(ports, torch.tensor([server.getsockname()[1]]))
        to_right.connect(("127.0.0.1", int(ports[get_neighbors()[1]])))
        from_left, _ = server.accept()
        with from_left:
            to_right.sendall(bytes(4))
            received_small = from_left.recv(4, socket.MSG_WAITALL)
            large_message = bytes(4 * ELEMENTS)
            sender = threading.Thread(target=to_right.sendall, args=(large_message,))
            sender.start()
            received_large = from_left.recv(len(large_message), socket.MSG_WAITALL)
            sender.join()
            to_right.settimeout(BLOCKED_TIMEOUT)
            outcome = record_outcome(lambda: to_right.sendall(large_message))
            dist.barrier()  # no rank closes its sockets before all ranks have sent
    return {"mistake": outcome, "small message": len(received_small), "correct": len(received_large)}


# ---- `out=`


def gather_by_sum(out: Tensor, x: Tensor) -> None:
    """An all-gather as a sum of vectors that are zero except for one rank. The mistake: `x` may be a part of `out`."""
    out.zero_()
    out[dist.get_rank()] = x
    dist.all_reduce(out)


def gather_by_torch(out: Tensor, x: Tensor) -> None:
    dist.all_gather_into_tensor(out, x.view(1))


def output_overlaps_input(world: World) -> Any:
    """Return results of an all-gather whose input is a slice of its output, as in FSDP2, and of in-place exchanges."""

    def gather(all_gather: Callable[[Tensor, Tensor], Any], from_slice: bool) -> Any:
        x = torch.tensor(world.rank + 1.0)
        out = torch.zeros(RANKS)
        out[world.rank] = x
        all_gather(out, out[world.rank] if from_slice else x)
        return out.tolist()

    def count_wrong_exchanges(in_place: bool) -> int:
        expected = [10.0 * rank + world.rank for rank in range(RANKS)]
        wrong_count = 0
        for _ in range(EXCHANGES):
            x = torch.arange(RANKS) + 10.0 * world.rank
            out = x if in_place else torch.empty_like(x)
            dist.all_to_all_single(out, x)
            if out.tolist() != expected:
                wrong_count += 1
        return wrong_count

    return {
        "sum of slices": gather(gather_by_sum, from_slice=True),
        "sum of separate inputs": gather(gather_by_sum, from_slice=False),
        "torch with slices": gather(gather_by_torch, from_slice=True),
        "wrong exchanges in place": count_wrong_exchanges(in_place=True),
        "wrong exchanges": count_wrong_exchanges(in_place=False),
    }


# ---- gradients


def draw_shard(rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Draw the same batch on every rank, and return the inputs and targets of one rank."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 3, generator=generator, dtype=torch.float64)
    targets = (x**2).sum(1, keepdim=True)
    return x.chunk(ranks)[rank], targets.chunk(ranks)[rank]


def train(
    shard: tuple[Tensor, Tensor], synchronize: Callable[[list[Tensor]], object], learning_rate: float = LEARNING_RATE
) -> list[float]:
    """Return the weights after STEPS steps of SGD."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), learning_rate)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.mse_loss(model(shard[0]), shard[1]).backward()
        synchronize([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


def keep_local_gradients(gradients: list[Tensor]) -> None:
    """Train one process, without synchronization."""


def barrier_instead_of_all_reduce(world: World) -> Any:
    """The mistake: a barrier between backward and step, instead of an all-reduce."""
    shard = draw_shard(world.rank, RANKS)

    def average(gradients: list[Tensor]) -> None:
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient.div_(RANKS)

    return {
        "barrier": train(shard, lambda _: dist.barrier()),
        "no synchronization": train(shard, keep_local_gradients),
        "correct": train(shard, average),
        "full batch": train(draw_shard(0, 1), keep_local_gradients),
    }


def gradients_averaged_twice(world: World) -> Any:
    """The mistake: workers divide gradients by the number of workers, and the server (rank 0) averages them again."""
    workers = RANKS - 1

    def train_with_server(divisor: float) -> list[float]:
        def exchange(gradients: list[Tensor]) -> None:
            for gradient in gradients:
                if world.is_main:
                    pushed = [torch.empty_like(gradient) for _ in range(workers)]
                    for worker, buffer in enumerate(pushed, 1):
                        dist.recv(buffer, worker)
                    gradient[:] = torch.stack(pushed).mean(0)
                else:
                    dist.send(gradient / divisor, 0)
                dist.broadcast(gradient, 0)  # every rank executes the server's step, so that no weights are pulled

        return train(draw_shard(max(0, world.rank - 1), workers), exchange)

    batch = draw_shard(0, 1)
    return {
        "mistake": train_with_server(workers),
        "reduced learning rate": train(batch, keep_local_gradients, LEARNING_RATE / workers),
        "correct": train_with_server(1),
        "one process": train(batch, keep_local_gradients),
    }


CASES = (
    *(shadowed_all_gather, ring_all_reduces, blocking_sends, blocking_sockets),
    *(output_overlaps_input, barrier_instead_of_all_reduce, gradients_averaged_twice),
)


def execute_all() -> Any:
    """Execute all cases in one launch of ranks, and return the outcomes of each rank by case."""
    return collect_from_ranks(RANKS, lambda world: {case.__name__: case(world) for case in CASES}, STEP_TIMEOUT)
