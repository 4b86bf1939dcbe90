"""Collectives on tensors in main memory, among ranks that have a link to and one from each other.

An all-reduce makes the moves of its algorithm (common/distributed/transport/algorithms.py). In all other collectives a
rank sends each block straight to the rank that needs it: n (p - 1) / p bytes leave and reach it in a reduce-scatter or
all-to-all, as in a ring, but without waiting along one. A large broadcast is a scatter and an all-gather (Barnett et
al. 1994, "Interprocessor collective communication library"), so that its root sends 2 n (p - 1) / p bytes, not
(p - 1) n.

Results are equal on all ranks and from run to run, to the bit: every number is reduced in one order, at one rank, and
copied from there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common.distributed.builtin.arguments import COMBINE, Combine, Operation, choose_precision
from common.distributed.transport.incoming import Expected, Incoming
from common.distributed.transport.links import Outgoing
from common.distributed.transport.moves import Algorithm, find_chunk

SMALL = 1 << 16  # bytes up to which the root of a broadcast sends everything to everybody
GRAIN = 1 << 15  # numbers that torch adds up in one thread: the group's would get a pool of threads of its own
MESSAGE = 1 << 63  # bit of the tags of point-to-point messages, which are apart from those of collectives


class Block:
    """Bytes of a tensor in a row: its own memory, or a copy where that has gaps."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.is_copy = not tensor.is_contiguous()
        plain = self.tensor.contiguous() if self.is_copy else self.tensor
        self.bytes: np.ndarray = plain.view(-1).view(torch.uint8).numpy()

    @property
    def values(self) -> Tensor:
        """The bytes as numbers [n], apart from what autograd knows of the tensor."""
        dtype = self.tensor.dtype
        return torch.frombuffer(self.bytes, dtype=dtype) if len(self.bytes) else torch.empty(0, dtype=dtype)

    def fill(self, values: Tensor) -> None:
        """Write numbers [n] of any type, and store them."""
        self.values.copy_(values)
        self.store()

    def store(self) -> None:
        """Copy the bytes back to the tensor where they are not its own memory."""
        if self.is_copy:
            with torch.inference_mode():  # which may write to every tensor
                self.tensor.copy_(self.values.view(self.tensor.shape))


class Flying(NamedTuple):
    """A message on its way out."""

    link: Outgoing
    ticket: int

    def wait(self, seconds: float | None = None) -> None:
        """Wait until its bytes may change, with `seconds` so long at most. Raises LinkError, LinkTimeout."""
        self.link.wait(self.ticket, seconds)


Parcel = tuple[int, np.ndarray]  # the other rank, and the bytes to send to it or to receive from it


class Communicator:
    """Collectives among `size` ranks, which all call the same ones in the same order, from one thread at a time.

    Point-to-point messages may be sent and received by other threads meanwhile. Ranks are those of the group.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        outgoing: dict[int, Outgoing],
        incoming: dict[int, Incoming],
        algorithms: Sequence[tuple[int, Algorithm]],
    ) -> None:
        """`algorithms` are pairs (smallest vector in bytes, all-reduce), in ascending order; the first size is 0."""
        self.rank, self.size = rank, size
        self.outgoing, self.incoming, self.algorithms = outgoing, incoming, algorithms
        self.tags = itertools.count()
        # at any time each rank sends to another one
        self.targets = [(rank + distance) % size for distance in range(1, size)]
        self.sources = [(rank - distance) % size for distance in range(1, size)]

    def close(self) -> None:
        """Close all links, from any thread: a collective that waits raises LinkError at once."""
        for link in (*self.outgoing.values(), *self.incoming.values()):
            link.close()

    # ---- reductions

    def all_reduce(self, tensor: Tensor, op: Operation) -> None:
        """Reduce a tensor of the same shape on all ranks, in place.

        bfloat16 and float16 travel as float32, in which they are added up: twice their bytes.
        """
        block, precision = Block(tensor), choose_precision(op, tensor.dtype)
        vector, data = block.values, block.bytes
        if precision != tensor.dtype:
            vector = vector.to(precision)
            data = vector.view(torch.uint8).numpy()
        self._play_algorithm(vector, data, COMBINE[op])
        if op == dist.ReduceOp.AVG:
            divide_in_place(vector, self.size)
        if precision != tensor.dtype:
            block.values.copy_(vector)
        block.store()

    def reduce(self, tensor: Tensor, op: Operation, root: int) -> None:
        """Reduce a tensor into that of `root`; the other ranks keep theirs."""
        self.all_reduce(tensor if self.rank == root else tensor.detach().clone(), op)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: Operation) -> None:
        """Reduce `inputs[r]` of all ranks into the output of rank r; both may share memory."""
        tag, blocks = next(self.tags), [Block(value) for value in inputs]
        flying = [self._send(peer, tag, blocks[peer].bytes) for peer in self.targets]
        own = blocks[self.rank].values
        total = own.to(choose_precision(op, own.dtype), copy=True)
        for peer in self.sources:
            self._combine(peer, tag, total, own.dtype, COMBINE[op])
        if op == dist.ReduceOp.AVG:
            divide_in_place(total, self.size)
        wait_for_all(flying)
        Block(output).fill(total)

    # ---- copies

    def all_gather(self, outputs: Sequence[Tensor], value: Tensor) -> None:
        """Fill `outputs[r]` with the value of rank r, on all ranks; the value may share memory with outputs."""
        blocks = [Block(output) for output in outputs]
        own = copy_overlapping([Block(value)], [block for rank, block in enumerate(blocks) if rank != self.rank])[0]
        self._exchange([(peer, own) for peer in self.targets], [(peer, blocks[peer].bytes) for peer in self.sources])
        blocks[self.rank].bytes[:] = own
        store_all(blocks)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Fill `outputs[r]` with the input of rank r for this rank; blocks may share memory and differ in size."""
        blocks = [Block(output) for output in outputs]
        given = copy_overlapping([Block(value) for value in inputs], blocks)
        self._exchange(
            [(peer, given[peer]) for peer in self.targets], [(peer, blocks[peer].bytes) for peer in self.sources]
        )
        blocks[self.rank].bytes[:] = given[self.rank]
        store_all(blocks)

    def gather(self, outputs: Sequence[Tensor], value: Tensor, root: int) -> None:
        """Fill `outputs[r]` on rank `root` with the value of rank r; outputs are empty elsewhere."""
        if self.rank != root:
            self._exchange([(root, Block(value).bytes)], [])
            return
        blocks = [Block(output) for output in outputs]
        (own,) = copy_overlapping([Block(value)], blocks)
        self._exchange([], [(peer, blocks[peer].bytes) for peer in self.sources])
        blocks[root].bytes[:] = own
        store_all(blocks)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        """Fill the output of rank r with `inputs[r]` of rank `root`; inputs are empty elsewhere."""
        block = Block(output)
        if self.rank == root:
            self._exchange([(peer, Block(inputs[peer]).bytes) for peer in self.targets], [])
            block.bytes[:] = Block(inputs[root]).bytes
        else:
            self._exchange([], [(root, block.bytes)])
        block.store()

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite a tensor with that of rank `root`."""
        block = Block(tensor)
        length = len(block.bytes)
        cuts = [find_chunk(length, self.size, rank) if length > SMALL else (0, 0) for rank in range(self.size)]
        parts = [block.bytes[begin:end] for begin, end in cuts]
        if length <= SMALL:
            parts[root] = block.bytes
        to_others = [(peer, parts[self.rank]) for peer in self.targets if peer != root]
        if self.rank == root:
            self._exchange([(peer, parts[peer]) for peer in self.targets], [])
            self._exchange(to_others, [])
        else:
            self._exchange([], [(root, parts[self.rank])])
            self._exchange(to_others, [(peer, parts[peer]) for peer in self.sources])
        block.store()

    def barrier(self) -> None:
        """Wait until all ranks have called it: log2(p) rounds, in each of which what a rank knows of doubles.

        Hensgen, Finkel, Manber 1988, "Two algorithms for barrier synchronization" (doi:10.1007/BF01379320).
        """
        token, distance = np.zeros(1, np.uint8), 1
        while distance < self.size:
            self._exchange([(self.targets[distance - 1], token)], [(self.sources[distance - 1], token.copy())])
            distance *= 2

    # ---- messages

    def send(self, tensor: Tensor, target: int, tag: int) -> Flying:
        """Begin to send a tensor; its bytes must not change before `wait` of what this returns."""
        return self._send(target, MESSAGE | tag, Block(tensor).bytes)

    def expect(self, tensor: Tensor, source: int, tag: int) -> tuple[Block, Expected]:
        """Give memory for the next message of a tag, without waiting: `Incoming.wait_for`, then `Block.store`."""
        block = Block(tensor)
        return block, self.incoming[source].expect(MESSAGE | tag, block.bytes.data)

    def _send(self, target: int, tag: int, data: np.ndarray) -> Flying:
        link = self.outgoing[target]
        return Flying(link, link.send(tag, data.data))

    def _exchange(self, sends: Iterable[Parcel], receives: Iterable[Parcel]) -> None:
        """Send and receive bytes; both sides know which are none, and leave those messages out."""
        tag = next(self.tags)
        flying = [self._send(peer, tag, data) for peer, data in sends if len(data)]
        for peer, data in receives:
            if len(data):
                self.incoming[peer].receive(tag, data.data)
        wait_for_all(flying)

    def _play_algorithm(self, vector: Tensor, data: np.ndarray, combine: Combine) -> None:
        """Make this rank's moves on a vector [n] and its bytes; what is still being sent is not overwritten."""
        tag, width, length = next(self.tags), vector.element_size(), vector.numel()
        algorithm = next(one for least, one in reversed(self.algorithms) if len(data) >= least)
        sending: list[tuple[int, int, Flying]] = []
        for kind, chunk, peer, count in algorithm.moves[self.rank]:
            begin, end = find_chunk(length, algorithm.chunks, chunk, count)
            if begin == end:
                continue
            part = data[begin * width : end * width]
            if kind == "send":
                sending.append((begin, end, self._send(peer, tag, part)))
                continue
            if sending:
                wait_for_all(message for first, last, message in sending if first < end and begin < last)
                sending = [one for one in sending if not (one[0] < end and begin < one[1])]
            if kind == "add":
                self._combine(peer, tag, vector[begin:end], vector.dtype, combine)
            else:
                self.incoming[peer].receive(tag, part.data)
        wait_for_all(message for *_, message in sending)

    def _combine(self, source: int, tag: int, total: Tensor, dtype: torch.dtype, combine: Combine) -> None:
        """Add a message of numbers of a type to a vector [n], piece by piece as they come in."""
        begin, width = 0, dtype.itemsize
        for piece in self.incoming[source].receive_pieces(tag, total.numel() * width):
            for start in range(0, len(piece), GRAIN * width):
                values = torch.frombuffer(piece[start : start + GRAIN * width], dtype=dtype)
                end = begin + values.numel()
                part = total[begin:end]
                combine(part, values, out=part)
                begin = end


def divide_in_place(total: Tensor, size: int) -> None:
    """Divide numbers in place, complex ones as torch does it, whose all-reduce sees their two parts."""
    (torch.view_as_real(total) if total.is_complex() else total).div_(size)


def wait_for_all(messages: Iterable[Flying]) -> None:
    """Wait until messages are sent."""
    for message in messages:
        message.wait()


def store_all(blocks: Iterable[Block]) -> None:
    """Store the bytes of blocks that are copies."""
    for block in blocks:
        block.store()


def copy_overlapping(sources: Sequence[Block], targets: Sequence[Block]) -> list[np.ndarray]:
    """Return the bytes of the sources, copied where they lie in memory that is about to be received into."""
    found = []
    for source in sources:
        shared = any(np.may_share_memory(source.bytes, target.bytes) for target in targets)
        found.append(source.bytes.copy() if shared else source.bytes)
    return found
