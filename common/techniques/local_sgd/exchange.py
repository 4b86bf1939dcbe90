"""Exchanges that average a vector over all local-SGD workers, without or with compression.

A lossy exchange uses error feedback: each worker adds the compression error to the vector of its next exchange
(Karimireddy et al. 2019, arXiv 1901.09847; for local steps Basu et al. 2019, arXiv 1906.02367).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

INT8_LEVELS = 127  # on either side of 0


class Exchange:
    """Uncompressed exchange of a vector [n]: one all-reduce."""

    lossy = False

    def __init__(self, like: Tensor, workers: int) -> None:
        """Vectors have the length, type and device of `like` [n]."""
        self.workers = workers
        self.bytes_sent = 0
        """Bytes that this worker has passed to collectives."""
        self.works: list[dist.Work] = []
        self.residual = torch.zeros_like(like) if self.lossy else None
        """Compression error [n], which this worker has not sent yet; None if the exchange is lossless."""
        self.in_flight = False

    def begin(self, vector: Tensor) -> None:
        """Start to exchange a vector [n], which is not changed. All workers call it."""
        self.in_flight = True
        self.encode(vector.clone() if self.residual is None else vector + self.residual)

    def finish(self) -> Tensor:
        """Wait for the exchange; return the mean [n], the same on all workers. All workers call it."""
        self.wait()
        self.in_flight = False
        return self.decode()

    def encode(self, vector: Tensor) -> None:
        """Start to send a vector, which may be changed, and store the compression error."""
        self.sum = vector
        self.reduce(vector)

    def decode(self) -> Tensor:
        """Return the mean of the received messages."""
        return self.sum.div_(self.workers)

    def reduce(self, tensor: Tensor) -> None:
        """Start to sum a tensor over all workers, in place."""
        self.bytes_sent += tensor.nbytes
        self.works.append(dist.all_reduce(tensor, async_op=True))

    def gather(self, message: Tensor) -> Tensor:
        """Start to gather the messages [b] of all workers; return the tensor that receives them [workers, b]."""
        self.bytes_sent += message.nbytes
        messages = message.new_empty(self.workers * len(message))
        self.works.append(dist.all_gather_into_tensor(messages, message, async_op=True))  # type: ignore[arg-type]
        return messages.view(self.workers, -1)

    def wait(self) -> None:
        """Wait for all collectives that were started."""
        for work in self.works:
            work.wait()
        self.works.clear()

    def average(self, vector: Tensor) -> Tensor:
        """Return the mean of an uncompressed vector over all workers, while no exchange is in flight."""
        total = vector.clone()
        self.reduce(total)
        self.wait()
        return total.div_(self.workers)

    def collect(self) -> dict[str, Tensor]:
        """Return the tensors on which the next exchange depends, while none is in flight."""
        return {} if self.residual is None else {"residual": self.residual}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load tensors returned by `collect`. Those saved with other settings are ignored."""
        for name, tensor in self.collect().items():
            if name in saved and saved[name].shape == tensor.shape:
                tensor.copy_(saved[name])


class Bf16Exchange(Exchange):
    """Exchange in bfloat16: 2 n bytes. The sum is also bfloat16, and its rounding error is lost."""

    lossy = True

    def encode(self, vector: Tensor) -> None:
        self.sum = vector.bfloat16()
        self.residual = vector - self.sum.to(vector)
        self.reduce(self.sum)

    def decode(self) -> Tensor:
        assert self.residual is not None
        return self.sum.to(self.residual).div_(self.workers)


class Int8Exchange(Exchange):
    """Exchange in int8 with a float32 scale per parameter: n bytes, and 4 bytes per parameter."""

    lossy = True

    def __init__(self, like: Tensor, workers: int, sizes: list[int]) -> None:
        """`sizes` are the numbers of elements of the parameters, n in total."""
        super().__init__(like, workers)
        self.sizes = sizes
        self.counts = torch.tensor(sizes, device=like.device)

    def encode(self, vector: Tensor) -> None:
        parts = vector.split(self.sizes)
        largest = torch.stack([part.abs().max() for part in parts])
        scales = torch.where(largest > 0, largest / INT8_LEVELS, torch.ones_like(largest)).float()
        levels = (vector / scales.repeat_interleave(self.counts)).round_()
        levels = levels.clamp_(-INT8_LEVELS, INT8_LEVELS).to(torch.int8)
        message = torch.cat([levels.view(torch.uint8), scales.view(torch.uint8)])
        self.messages = self.gather(message)
        self.residual = vector - self.decode_message(message)

    def decode_message(self, message: Tensor) -> Tensor:
        """Return the vector [n] in a message."""
        length = sum(self.sizes)
        scales = message[length:].clone().view(torch.float32)
        return message[:length].view(torch.int8) * scales.repeat_interleave(self.counts)

    def decode(self) -> Tensor:
        return torch.stack([self.decode_message(message) for message in self.messages]).mean(0)


class TopkExchange(Exchange):
    """Exchange of the k numbers of largest magnitude (Aji and Heafield 2017, arXiv 1704.05021).

    A message contains k numbers and their positions in int32: 8 k bytes, or 12 k with float64.
    """

    lossy = True

    def __init__(self, like: Tensor, workers: int, fraction: float) -> None:
        super().__init__(like, workers)
        self.count = max(1, round(fraction * len(like)))

    def encode(self, vector: Tensor) -> None:
        positions = vector.abs().topk(self.count, sorted=False).indices
        numbers = vector[positions].view(torch.uint8)
        message = torch.cat([numbers, positions.to(torch.int32).view(torch.uint8)])
        self.messages = self.gather(message)
        vector[positions] = 0
        self.residual = vector

    def decode(self) -> Tensor:
        assert self.residual is not None
        total = torch.zeros_like(self.residual)
        for message in self.messages:  # in rank order, so that the sum is the same on all workers
            values, positions = message.split([self.count * total.itemsize, self.count * 4])
            total.index_add_(0, positions.clone().view(torch.int32), values.clone().view(total.dtype))
        return total.div_(self.workers)
