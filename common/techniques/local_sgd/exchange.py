"""Exchanges that average a vector over all local SGD workers, with or without compression.

Lossy exchanges use error feedback: each worker adds its compression error to the vector that it sends in the next
exchange (Karimireddy et al. 2019, arXiv 1901.09847; for local steps, Basu et al. 2019, arXiv 1906.02367).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

INT8_LEVELS = 127  # largest absolute value of a quantized number


class Exchange:
    """Exchange of an uncompressed vector [n] by one all-reduce."""

    lossy = False

    def __init__(self, like: Tensor, workers: int) -> None:
        """Prepare exchanges of vectors that have the length, data type, and device of `like` [n]."""
        self.workers = workers
        self.bytes_sent = 0
        """Total size, in bytes, of the tensors that this worker has passed to collectives."""
        self.works: list[dist.Work] = []
        self.residual = torch.zeros_like(like) if self.lossy else None
        """Compression error [n] that this worker adds to the next vector; None if the exchange is lossless."""
        self.in_flight = False

    def begin_exchange(self, vector: Tensor) -> None:
        """Start an asynchronous exchange of a vector [n], which is not modified.

        All workers must call this method.
        """
        self.in_flight = True
        self.compress_and_send(vector.clone() if self.residual is None else vector + self.residual)

    def finish_exchange(self) -> Tensor:
        """Wait for the exchange to finish, and return the mean [n] over all workers.

        The mean is identical on all workers. All workers must call this method.
        """
        self.wait_for_collectives()
        self.in_flight = False
        return self.decompress_mean()

    def compress_and_send(self, vector: Tensor) -> None:
        """Compress a vector, start sending the compressed vector, and store the compression error.

        This method may modify the vector.
        """
        self.sum = vector
        self.start_all_reduce(vector)

    def decompress_mean(self) -> Tensor:
        """Return the mean [n] of the vectors that all workers have sent."""
        return self.sum.div_(self.workers)

    def start_all_reduce(self, tensor: Tensor) -> None:
        """Start an asynchronous all-reduce that sums a tensor over all workers in place."""
        self.bytes_sent += tensor.nbytes
        self.works.append(dist.all_reduce(tensor, async_op=True))

    def start_all_gather(self, message: Tensor) -> Tensor:
        """Start an asynchronous all-gather of one message [b] per worker.

        Returns the output tensor [workers, b], which is valid after `wait_for_collectives`.
        """
        self.bytes_sent += message.nbytes
        messages = message.new_empty(self.workers * len(message))
        self.works.append(dist.all_gather_into_tensor(messages, message, async_op=True))  # type: ignore[arg-type]
        return messages.view(self.workers, -1)

    def wait_for_collectives(self) -> None:
        """Wait for all collectives that this exchange has started."""
        for work in self.works:
            work.wait()
        self.works.clear()

    def average_uncompressed(self, vector: Tensor) -> Tensor:
        """Return the mean of a vector over all workers, without compression.

        All workers must call this method, and only while no exchange is in flight.
        """
        total = vector.clone()
        self.start_all_reduce(total)
        self.wait_for_collectives()
        return total.div_(self.workers)

    def collect_state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint must contain for the next exchange, such as the compression error.

        Call this method only while no exchange is in flight.
        """
        return {} if self.residual is None else {"residual": self.residual}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Load tensors returned by `collect_state`. Tensors with a different shape are ignored."""
        for name, tensor in self.collect_state().items():
            if name in saved and saved[name].shape == tensor.shape:
                tensor.copy_(saved[name])


class Bf16Exchange(Exchange):
    """Exchange of a vector [n] in bfloat16, in which each worker passes 2 n bytes to an all-reduce.

    Error feedback corrects the error from converting each vector to bfloat16, but not the error from rounding the sum.
    """

    lossy = True

    def compress_and_send(self, vector: Tensor) -> None:
        self.sum = vector.bfloat16()
        self.residual = vector - self.sum.to(vector)
        self.start_all_reduce(self.sum)

    def decompress_mean(self) -> Tensor:
        assert self.residual is not None
        return self.sum.to(self.residual).div_(self.workers)


class Int8Exchange(Exchange):
    """Exchange of a vector [n] in int8 with one float32 scale per parameter tensor.

    Each worker sends n bytes, plus 4 bytes per parameter tensor.
    """

    lossy = True

    def __init__(self, like: Tensor, workers: int, sizes: list[int]) -> None:
        """Prepare exchanges of parameter tensors that have `sizes[i]` elements each, n in total."""
        super().__init__(like, workers)
        self.sizes = sizes
        self.counts = torch.tensor(sizes, device=like.device)

    def compress_and_send(self, vector: Tensor) -> None:
        parts = vector.split(self.sizes)
        largest = torch.stack([part.abs().max() for part in parts])
        scales = torch.where(largest > 0, largest / INT8_LEVELS, torch.ones_like(largest)).float()
        levels = (vector / scales.repeat_interleave(self.counts)).round_()
        levels = levels.clamp_(-INT8_LEVELS, INT8_LEVELS).to(torch.int8)
        message = torch.cat([levels.view(torch.uint8), scales.view(torch.uint8)])
        self.messages = self.start_all_gather(message)
        self.residual = vector - self.decode_message(message)

    def decode_message(self, message: Tensor) -> Tensor:
        """Return the vector [n] that a message contains."""
        length = sum(self.sizes)
        scales = message[length:].clone().view(torch.float32)
        return message[:length].view(torch.int8) * scales.repeat_interleave(self.counts)

    def decompress_mean(self) -> Tensor:
        return torch.stack([self.decode_message(message) for message in self.messages]).mean(0)


class TopkExchange(Exchange):
    """Exchange of the k values of largest magnitude in a vector (Aji and Heafield 2017, arXiv 1704.05021).

    A message contains k values and their positions as int32. The message has 8 k bytes for float32 values, and 12 k
    bytes for float64 values.
    """

    lossy = True

    def __init__(self, like: Tensor, workers: int, fraction: float) -> None:
        super().__init__(like, workers)
        self.count = max(1, round(fraction * len(like)))

    def compress_and_send(self, vector: Tensor) -> None:
        positions = vector.abs().topk(self.count, sorted=False).indices
        numbers = vector[positions].view(torch.uint8)
        message = torch.cat([numbers, positions.to(torch.int32).view(torch.uint8)])
        self.messages = self.start_all_gather(message)
        vector[positions] = 0
        self.residual = vector

    def decompress_mean(self) -> Tensor:
        assert self.residual is not None
        total = torch.zeros_like(self.residual)
        for message in self.messages:  # in rank order, so that rounding is identical on all workers
            values, positions = message.split([self.count * total.itemsize, self.count * 4])
            total.index_add_(0, positions.clone().view(torch.int32), values.clone().view(total.dtype))
        return total.div_(self.workers)
