"""Collectives on tensors in main memory, over links between all pairs of ranks.

An all-reduce executes the moves of its algorithm (common/backend/algorithms). In most other collectives, a rank
sends each block directly to the rank that needs it. In a reduce-scatter or all-to-all of n bytes per rank, each of p
ranks sends and receives n (p - 1) / p bytes. A ring sends the same number of bytes, but has a higher latency. A large
broadcast is a scatter followed by an all-gather (Barnett et al. 1994, "Interprocessor collective communication
library"). The root of the broadcast therefore sends 2 n (p - 1) / p bytes instead of n (p - 1) bytes.

Results are bitwise identical on all ranks and in all runs. Each number is reduced in a fixed order on one rank and is
then copied to the other ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common.backend.algorithms.moves import Algorithm, compute_chunk_bounds
from common.backend.arguments import COMBINE_FUNCTIONS, Combine, Operation, choose_precision
from common.ranks.links.incoming import ExpectedMessage, IncomingLink
from common.ranks.links.outgoing import OutgoingLink

SMALL_BYTES = 1 << 16  # size up to which the root of a broadcast sends the whole tensor to every rank
GRAIN_ELEMENTS = 1 << 15  # largest number of elements that torch adds in the calling thread, without starting threads
MESSAGE_BIT = 1 << 63  # bit of a tag that separates point-to-point messages from collectives


class TensorBytes:
    """Contiguous bytes of a tensor: the memory of the tensor, or a copy if the tensor is not contiguous."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.is_copy = not tensor.is_contiguous()
        contiguous = self.tensor.contiguous() if self.is_copy else self.tensor
        self.bytes: np.ndarray = contiguous.view(-1).view(torch.uint8).numpy()

    @property
    def elements(self) -> Tensor:
        """View of the bytes as a tensor [n] of the original data type, without autograd state."""
        dtype = self.tensor.dtype
        return torch.frombuffer(self.bytes, dtype=dtype) if len(self.bytes) else torch.empty(0, dtype=dtype)

    def write_elements(self, elements: Tensor) -> None:
        """Write elements [n] of any data type to the tensor."""
        self.elements.copy_(elements)
        self.write_back()

    def write_back(self) -> None:
        """Copy the bytes back to the tensor if they are a copy."""
        if self.is_copy:
            with torch.inference_mode():  # inference mode allows writing to any tensor
                self.tensor.copy_(self.elements.view(self.tensor.shape))


class PendingSend(NamedTuple):
    """Message that is being sent to another rank."""

    link: OutgoingLink
    ticket: int

    def wait(self, seconds: float | None = None) -> None:
        """Wait at most `seconds` until the bytes of the message may be modified.

        Raises LinkError if the link fails, and LinkTimeout if the time limit is exceeded.
        """
        self.link.wait_until_written(self.ticket, seconds)


PeerBytes = tuple[int, np.ndarray]  # a peer, and the bytes to send to this peer or to receive from this peer
ChunkSend = tuple[int, int, PendingSend]  # index of the first element, index after the last element, and message


class Communicator:
    """Collectives and point-to-point messages among the `size` ranks of a group.

    All ranks must call the same collectives in the same order, from one thread at a time. Other threads may send and
    receive point-to-point messages at the same time. Rank numbers refer to the group.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        outgoing: dict[int, OutgoingLink],
        incoming: dict[int, IncomingLink],
        algorithms: Sequence[tuple[int, Algorithm]],
    ) -> None:
        """Create the communicator of one rank from its links to all other ranks.

        `algorithms` are the all-reduce algorithms; see `replace_algorithms`.
        """
        self.rank = rank
        self.size = size
        self.outgoing = outgoing
        self.incoming = incoming
        self.replace_algorithms(algorithms)
        self.tags = itertools.count()
        # At any time, all ranks send to different targets.
        self.targets = [(rank + distance) % size for distance in range(1, size)]
        self.sources = [(rank - distance) % size for distance in range(1, size)]

    def replace_algorithms(self, algorithms: Sequence[tuple[int, Algorithm]]) -> None:
        """Use these all-reduce algorithms from the next all-reduce on. All ranks must call this method.

        `algorithms` contains pairs (minimum vector size in bytes, algorithm). Raises ValueError unless the pairs are in
        ascending order of size and the first size is 0.
        """
        sizes = [size for size, _ in algorithms]
        if sizes != sorted(sizes) or sizes[:1] != [0]:
            raise ValueError(f"the minimum sizes of algorithms must be in ascending order, starting with 0: {sizes}")
        self.algorithms = algorithms

    def close(self) -> None:
        """Close all links, so that a waiting collective raises LinkError. Any thread can call this method."""
        for link in (*self.outgoing.values(), *self.incoming.values()):
            link.close()

    # ---- reductions

    def all_reduce(self, tensor: Tensor, op: Operation) -> None:
        """Reduce tensors of the same shape over all ranks, in place.

        Sums and products of bfloat16 and float16 numbers are computed and sent in float32, which doubles the number of
        bytes.
        """
        block = TensorBytes(tensor)
        precision = choose_precision(op, tensor.dtype)
        vector = block.elements
        data = block.bytes
        if precision != tensor.dtype:
            vector = vector.to(precision)
            data = vector.view(torch.uint8).numpy()
        self._execute_moves(vector, data, COMBINE_FUNCTIONS[op])
        if op == dist.ReduceOp.AVG:
            divide_in_place(vector, self.size)
        if precision != tensor.dtype:
            block.elements.copy_(vector)
        block.write_back()

    def reduce(self, tensor: Tensor, op: Operation, root: int) -> None:
        """Reduce the tensors of all ranks into the tensor of rank `root`. The tensors of other ranks do not change."""
        self.all_reduce(tensor if self.rank == root else tensor.detach().clone(), op)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: Operation) -> None:
        """Reduce `inputs[r]` of all ranks into the output of rank r.

        The output and the inputs may share memory.
        """
        tag = next(self.tags)
        blocks = [TensorBytes(tensor) for tensor in inputs]
        sends = [self._send(peer, tag, blocks[peer].bytes) for peer in self.targets]
        local = blocks[self.rank].elements
        total = local.to(choose_precision(op, local.dtype), copy=True)
        for peer in self.sources:
            self._receive_and_combine(peer, tag, total, local.dtype, COMBINE_FUNCTIONS[op])
        if op == dist.ReduceOp.AVG:
            divide_in_place(total, self.size)
        wait_for_sends(sends)
        TensorBytes(output).write_elements(total)

    # ---- copies

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Fill `outputs[r]` with the tensor of rank r, on all ranks.

        The tensor and the outputs may share memory.
        """
        blocks = [TensorBytes(output) for output in outputs]
        local = copy_if_overlapping(tensor, [blocks[peer] for peer in self.sources])
        sends = [(peer, local) for peer in self.targets]
        self._exchange_bytes(sends, self._list_receives(blocks))
        blocks[self.rank].bytes[:] = local
        write_back_all(blocks)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Fill `outputs[r]` with the input tensor that rank r provides for this rank.

        The tensors may share memory and may differ in size.
        """
        blocks = [TensorBytes(output) for output in outputs]
        local = [copy_if_overlapping(tensor, blocks) for tensor in inputs]
        sends = [(peer, local[peer]) for peer in self.targets]
        self._exchange_bytes(sends, self._list_receives(blocks))
        blocks[self.rank].bytes[:] = local[self.rank]
        write_back_all(blocks)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> None:
        """Fill `outputs[r]` on rank `root` with the tensor of rank r.

        `outputs` is empty on other ranks.
        """
        if self.rank != root:
            self._exchange_bytes([(root, TensorBytes(tensor).bytes)], [])
            return
        blocks = [TensorBytes(output) for output in outputs]
        local = copy_if_overlapping(tensor, blocks)
        self._exchange_bytes([], self._list_receives(blocks))
        blocks[root].bytes[:] = local
        write_back_all(blocks)

    def scatter(self, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        """Fill the output of rank r with `inputs[r]` of rank `root`.

        `inputs` is empty on other ranks.
        """
        block = TensorBytes(output)
        if self.rank == root:
            self._exchange_bytes([(peer, TensorBytes(inputs[peer]).bytes) for peer in self.targets], [])
            block.bytes[:] = TensorBytes(inputs[root]).bytes
        else:
            self._exchange_bytes([], [(root, block.bytes)])
        block.write_back()

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite the tensors of all ranks with the tensor of rank `root`."""
        block = TensorBytes(tensor)
        parts = self._divide_for_broadcast(block.bytes, root)
        local_part = parts[self.rank]
        sends = [(peer, local_part) for peer in self.targets if peer != root]
        if self.rank == root:
            scattered = [(peer, parts[peer]) for peer in self.targets]
            self._exchange_bytes(scattered, [])
            self._exchange_bytes(sends, [])
        else:
            self._exchange_bytes([], [(root, local_part)])
            receives = [(peer, parts[peer]) for peer in self.sources]
            self._exchange_bytes(sends, receives)
        block.write_back()

    def _divide_for_broadcast(self, data: np.ndarray, root: int) -> list[np.ndarray]:
        """Return, for each rank, the part of the data that the root sends to this rank in the scatter.

        Large data is divided into one chunk per rank. Small data is not divided: the part of the root contains all the
        data, and the parts of the other ranks are empty.
        """
        length = len(data)
        if length <= SMALL_BYTES:
            return [data if rank == root else data[:0] for rank in range(self.size)]
        parts = []
        for rank in range(self.size):
            start, end = compute_chunk_bounds(length, self.size, rank)
            parts.append(data[start:end])
        return parts

    def barrier(self) -> None:
        """Wait until all ranks have called this method.

        The barrier takes log2(p) rounds. After round k, each rank knows that min(2^k, p) ranks have called this method.
        Source: Hensgen, Finkel, and Manber 1988, "Two algorithms for barrier synchronization" (doi:10.1007/BF01379320).
        """
        token = np.zeros(1, np.uint8)
        distance = 1
        while distance < self.size:
            target = self.targets[distance - 1]
            source = self.sources[distance - 1]
            self._exchange_bytes([(target, token)], [(source, token.copy())])
            distance *= 2

    # ---- messages

    def send(self, tensor: Tensor, target: int, tag: int) -> PendingSend:
        """Start sending a tensor. The tensor must not be modified until `PendingSend.wait` has returned."""
        return self._send(target, MESSAGE_BIT | tag, TensorBytes(tensor).bytes)

    def prepare_receive(self, tensor: Tensor, source: int, tag: int) -> tuple[TensorBytes, ExpectedMessage]:
        """Provide the memory of a tensor for the next message with a given tag, without waiting for the message.

        To complete the receive, call `IncomingLink.wait_for_message` and then `TensorBytes.write_back`.
        """
        block = TensorBytes(tensor)
        return block, self.incoming[source].expect_message(MESSAGE_BIT | tag, block.bytes.data)

    def _send(self, target: int, tag: int, data: np.ndarray) -> PendingSend:
        link = self.outgoing[target]
        return PendingSend(link, link.send(tag, data.data))

    def _list_receives(self, blocks: Sequence[TensorBytes]) -> list[PeerBytes]:
        """Return all peers, each with the memory for the block that the peer sends to this rank."""
        return [(peer, blocks[peer].bytes) for peer in self.sources]

    def _exchange_bytes(self, sends: Iterable[PeerBytes], receives: Iterable[PeerBytes]) -> None:
        """Send and receive bytes. Empty messages are omitted by both the sender and the receiver."""
        tag = next(self.tags)
        pending = [self._send(peer, tag, data) for peer, data in sends if len(data)]
        for peer, data in receives:
            if len(data):
                self.incoming[peer].receive(tag, data.data)
        wait_for_sends(pending)

    def _execute_moves(self, vector: Tensor, data: np.ndarray, combine: Combine) -> None:
        """Execute this rank's moves of an all-reduce on a vector [n] and its bytes.

        Before a chunk is overwritten, this method waits until the chunk has been sent.
        """
        tag = next(self.tags)
        width = vector.element_size()
        length = vector.numel()
        algorithm = next(algorithm for smallest, algorithm in reversed(self.algorithms) if len(data) >= smallest)
        sends: list[ChunkSend] = []
        for kind, chunk, peer, count in algorithm.moves[self.rank]:
            start, end = compute_chunk_bounds(length, algorithm.chunks, chunk, count)
            if start == end:
                continue
            part = data[start * width : end * width]
            if kind == "send":
                sends.append((start, end, self._send(peer, tag, part)))
                continue
            if sends:
                sends = wait_for_overlapping_sends(sends, start, end)
            if kind == "add":
                self._receive_and_combine(peer, tag, vector[start:end], vector.dtype, combine)
            else:
                self.incoming[peer].receive(tag, part.data)
        wait_for_sends(pending for _, _, pending in sends)

    def _receive_and_combine(self, source: int, tag: int, total: Tensor, dtype: torch.dtype, combine: Combine) -> None:
        """Receive a message in pieces and combine each piece with the matching elements of `total`, a vector [n].

        The elements of the message have the data type `dtype`.
        """
        start = 0
        width = dtype.itemsize
        grain_bytes = GRAIN_ELEMENTS * width
        for piece in self.incoming[source].receive_pieces(tag, total.numel() * width):
            for offset in range(0, len(piece), grain_bytes):
                received = torch.frombuffer(piece[offset : offset + grain_bytes], dtype=dtype)
                end = start + received.numel()
                part = total[start:end]
                combine(part, received, out=part)
                start = end


def divide_in_place(total: Tensor, size: int) -> None:
    """Divide a tensor in place. Like torch, divide the real and imaginary parts of complex numbers separately."""
    (torch.view_as_real(total) if total.is_complex() else total).div_(size)


def wait_for_sends(sends: Iterable[PendingSend]) -> None:
    """Wait until all messages have been sent."""
    for pending in sends:
        pending.wait()


def wait_for_overlapping_sends(sends: Sequence[ChunkSend], start: int, end: int) -> list[ChunkSend]:
    """Wait for the sends that overlap a range of elements, and return all other sends."""
    remaining = []
    for send in sends:
        first, last, pending = send
        if first < end and start < last:
            pending.wait()
        else:
            remaining.append(send)
    return remaining


def write_back_all(blocks: Iterable[TensorBytes]) -> None:
    """For each block that is a copy, copy its bytes back to the tensor."""
    for block in blocks:
        block.write_back()


def copy_if_overlapping(tensor: Tensor, targets: Iterable[TensorBytes]) -> np.ndarray:
    """Return the bytes of a tensor. The bytes are copied if the tensor shares memory with a target."""
    source = TensorBytes(tensor).bytes
    overlaps = any(np.may_share_memory(source, target.bytes) for target in targets)
    return source.copy() if overlaps else source
