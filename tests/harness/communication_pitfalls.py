"""Mistakes of communication, made by four real ranks, for tests/pitfalls/.

python -m tests.harness.communication_pitfalls every      prints by name what each rank found, as JSON
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common.ranks.rendezvous import World
from tests.harness.ddp_pitfalls import attempt, in_ranks

RANKS, TRIES, STEPS, RATE = 4, 20, 5, 0.1
NUMBERS = 1 << 18  # float32: 1 MB
PATIENCE, SECONDS = 120.0, 0.5  # the limit of what goes well, and of what waits in vain


def neighbours() -> tuple[int, int]:
    """The ranks on the left and on the right in the ring."""
    return (dist.get_rank() - 1) % RANKS, (dist.get_rank() + 1) % RANKS


def swap(out: Tensor, into: Tensor) -> None:
    """Send to the right and receive from the left at once."""
    left, right = neighbours()
    request = dist.isend(out, right)
    dist.recv(into, left)
    assert request is not None
    request.wait()


# ---- all-gather


def all_gather(tensor: Any) -> Any:
    """The mistake: torch's all_gather was imported by name, and is this function from here on."""
    gathered: list[Any] = [None] * dist.get_world_size()
    all_gather(gathered)  # ... and the tensor is not handed over
    return gathered


def shadowed_all_gather(world: World) -> Any:
    """The mistakes of it come to light one after the other."""
    x = torch.tensor([float(world.rank)])
    meant: Any = dist.all_gather
    found = {
        "as written": attempt(lambda: all_gather(x)),
        "torch's": attempt(lambda: meant([None] * RANKS)),
        "with the tensor": attempt(lambda: meant([None] * RANKS, x)),
    }
    for name, into in (("one tensor", [torch.empty(1)] * RANKS), ("right", [torch.empty(1) for _ in range(RANKS)])):
        meant(into, x)
        found[name] = torch.cat(into).tolist()
    return found


# ---- ring all-reduce


def old_ring(send: Tensor, recv: Tensor, came: list[float]) -> None:
    """The ring all-reduce of the old tutorial (pytorch#31572); `came` gets what came in."""
    send_buff, recv_buff, accum = torch.zeros(send.size()), torch.zeros(send.size()), send.clone()
    for i in range(RANKS - 1):
        out, into, added = (send_buff, recv_buff, recv) if i % 2 == 0 else (recv_buff, send_buff, send)
        swap(out, into)
        accum += added  # an argument, not the buffer that was received into
        came.append(into.abs().max().item())
    recv[:] = accum


def whole_ring(send: Tensor, recv: Tensor) -> None:
    """The ring all-reduce of the tutorial since then: whole tensors go round."""
    send_buff, recv_buff, accum = send.clone(), send.clone(), send.clone()
    for i in range(RANKS - 1):
        out, into = (send_buff, recv_buff) if i % 2 == 0 else (recv_buff, send_buff)
        swap(out, into)
        accum += into
    recv[:] = accum


def count_received() -> int:
    """Bytes that came in over TCP so far, as the kernel counts them: tcpi_bytes_received in linux/tcp.h."""
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, or no TCP
            if str(path.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as line:
                    info = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    count += struct.unpack_from("Q", info, 128)[0]
    return count


def rings(world: World) -> Any:
    """The sum that each ring makes, and the bytes that a rank gets for it, in tensors."""
    x, came = torch.full((NUMBERS,), world.rank + 1.0), list[float]()

    def measure(ring: Callable[[Tensor, Tensor], object]) -> Any:
        total = torch.zeros_like(x)
        dist.barrier()
        before = count_received()
        ring(x, total)
        return {"sum": total.unique().tolist(), "bytes": (count_received() - before) / x.nbytes}

    old = measure(lambda send, recv: old_ring(send, recv, came))
    right = measure(lambda send, recv: dist.all_reduce(recv.copy_(send)))
    return {"old": old | {"came": came}, "whole": measure(whole_ring), "right": right}


# ---- sending


def blocking_sends(world: World) -> Any:
    """The mistake: every rank sends to its right, and only then receives from its left."""
    left, right = neighbours()
    group, limit = dist.new_group(), datetime.timedelta(seconds=SECONDS)
    assert isinstance(group, dist.ProcessGroup)

    def send_first() -> None:
        group.send([torch.ones(1)], right, 0).wait(limit)  # dist.send of one number, with a time limit
        group.recv([torch.empty(1)], left, 0).wait()

    def send_at_once(count: int) -> Any:
        into = torch.empty(count)
        swap(torch.full((count,), float(world.rank)), into)
        return into.unique().tolist()

    right_way = [send_at_once(count) for count in (1, NUMBERS)]
    dist.barrier()
    return {"mistake": attempt(send_first), "right": right_way}


def blocking_sockets(world: World) -> Any:
    """The same over sockets of one's own, with buffers of some ten kB: a few bytes, and many."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as to_right:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        to_right.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        ports = torch.empty(RANKS, dtype=torch.int64)
        dist.all_gather_into_tensor(ports, torch.tensor([server.getsockname()[1]]))
        to_right.connect(("127.0.0.1", int(ports[neighbours()[1]])))
        from_left, _ = server.accept()
        with from_left:
            few, many = bytes(4), bytes(4 * NUMBERS)
            to_right.sendall(few)
            found: dict[str, Any] = {"few": len(from_left.recv(len(few), socket.MSG_WAITALL))}
            sender = threading.Thread(target=to_right.sendall, args=(many,))
            sender.start()
            found["right"] = len(from_left.recv(len(many), socket.MSG_WAITALL))
            sender.join()
            to_right.settimeout(SECONDS)
            found["many"] = attempt(lambda: to_right.sendall(many))
            dist.barrier()  # nobody closes before all have found out
    return found


# ---- `out=`


def gather_by_sum(out: Tensor, x: Tensor) -> None:
    """An all-gather of one's own: zeros but for the own part, added up. The mistake: it takes x for another tensor."""
    out.zero_()
    out[dist.get_rank()] = x
    dist.all_reduce(out)


def overlapping_outputs(world: World) -> Any:
    """Whether the own part is a slice of what is gathered into, as FSDP2 has it; and an exchange in place."""
    own = torch.tensor(world.rank + 1.0)

    def gather(how: Callable[[Tensor, Tensor], Any], inside: bool) -> Any:
        out = torch.zeros(RANKS)
        out[world.rank] = own
        how(out, out[world.rank] if inside else own)
        return out.tolist()

    def exchange(inside: bool) -> int:
        wrong = 0
        for _ in range(TRIES):
            x = torch.arange(RANKS) + 10.0 * world.rank
            out = x if inside else torch.empty_like(x)
            dist.all_to_all_single(out, x)
            wrong += out.tolist() != [10.0 * rank + world.rank for rank in range(RANKS)]
        return wrong

    def torchs(out: Tensor, x: Tensor) -> None:
        dist.all_gather_into_tensor(out, x.view(1))

    gathered = {"slice": gather(gather_by_sum, True), "apart": gather(gather_by_sum, False)}
    return gathered | {"torch's": gather(torchs, True), "in place": exchange(True), "exchanged": exchange(False)}


# ---- gradients


def draw_shard(rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a rank: every rank draws the same batch, and takes its part."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(24, 3, generator=draw, dtype=torch.float64)
    return x.chunk(ranks)[rank], (x**2).sum(1, keepdim=True).chunk(ranks)[rank]


def train(
    shard: tuple[Tensor, Tensor], synchronise: Callable[[list[Tensor]], object], rate: float = RATE
) -> list[float]:
    """The weights after some steps of SGD."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.mse_loss(model(shard[0]), shard[1]).backward()
        synchronise([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def nothing(gradients: list[Tensor]) -> None:
    """One process needs none."""


def barrier_for_gradients(world: World) -> Any:
    """The mistake: a barrier between backward and step."""
    own = draw_shard(world.rank, RANKS)

    def average(gradients: list[Tensor]) -> None:
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient.div_(RANKS)

    found = {"barrier": train(own, lambda _: dist.barrier()), "alone": train(own, nothing)}
    return found | {"right": train(own, average), "whole batch": train(draw_shard(0, 1), nothing)}


def server_that_averages(world: World) -> Any:
    """The mistake: workers divide what they push by their number, and the server, rank 0, takes the mean of it."""
    workers = RANKS - 1

    def train_with_server(divisor: float) -> list[float]:
        def exchange(gradients: list[Tensor]) -> None:
            for gradient in gradients:
                if world.is_main:
                    pushed = [torch.empty_like(gradient) for _ in range(workers)]
                    for worker, into in enumerate(pushed, 1):
                        dist.recv(into, worker)
                    gradient[:] = torch.stack(pushed).mean(0)
                else:
                    dist.send(gradient / divisor, 0)
                dist.broadcast(gradient, 0)  # every rank makes the server's step, which leaves out a pull of weights

        return train(draw_shard(max(0, world.rank - 1), workers), exchange)

    batch = draw_shard(0, 1)
    third, alone = train(batch, nothing, RATE / workers), train(batch, nothing)
    return {"twice": train_with_server(workers), "a third": third, "right": train_with_server(1), "alone": alone}


CASES = (
    *(shadowed_all_gather, rings, blocking_sends, blocking_sockets),
    *(overlapping_outputs, barrier_for_gradients, server_that_averages),
)


def every() -> Any:
    """All cases, in one start of ranks."""
    return in_ranks(RANKS, lambda world: {case.__name__: case(world) for case in CASES}, PATIENCE)


if __name__ == "__main__":
    print(json.dumps({name: globals()[name]() for name in sys.argv[1:]}))
