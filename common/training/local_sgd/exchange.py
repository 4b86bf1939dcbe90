"""Exchange of a vector between all workers, whose result is its mean over them; and the same with few bytes.

What a message leaves out, the worker adds to the vector of the next exchange: error feedback (Karimireddy et al. 2019,
arXiv 1901.09847; for local steps Basu et al. 2019, arXiv 1906.02367).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LEVELS = 127  # of int8, on either side of 0


class Exchange:
    """Exchange of a vector [n] as it is: one all-reduce."""

    lossy = False

    def __init__(self, like: Tensor, workers: int) -> None:
        """Vectors are of the length, type and device of `like` [n]."""
        self.workers = workers
        self.bytes_sent = 0
        """Bytes that this worker has handed over to collectives."""
        self.works: list[dist.Work] = []
        self.residual = torch.zeros_like(like) if self.lossy else None
        """What of this worker's vectors [n] has not been sent yet; None where nothing is left out."""
        self.in_flight = False

    def begin(self, vector: Tensor) -> None:
        """Begin to send a vector [n], which stays as it is. All workers call it."""
        self.in_flight = True
        self.encode(vector.clone() if self.residual is None else vector + self.residual)

    def finish(self) -> Tensor:
        """Wait until the exchange is over; return the mean [n], the same on all workers. All of them call it."""
        self.wait()
        self.in_flight = False
        return self.decode()

    def encode(self, vector: Tensor) -> None:
        """Begin to send a vector that may be changed, and note what the message leaves out."""
        self.sum = vector
        self.reduce(vector)

    def decode(self) -> Tensor:
        """Return the mean from what came in."""
        return self.sum.div_(self.workers)

    def reduce(self, values: Tensor) -> None:
        """Begin to add up a tensor of all workers in place."""
        self.bytes_sent += values.nbytes
        self.works.append(dist.all_reduce(values, async_op=True))

    def gather(self, message: Tensor) -> Tensor:
        """Begin to collect the messages [b] of all workers; return where they arrive [workers, b]."""
        self.bytes_sent += message.nbytes
        arrived = message.new_empty(self.workers * len(message))
        self.works.append(dist.all_gather_into_tensor(arrived, message, async_op=True))  # type: ignore[arg-type]
        return arrived.view(self.workers, -1)

    def wait(self) -> None:
        """Wait until everything has arrived that was begun."""
        for work in self.works:
            work.wait()
        self.works.clear()

    def average(self, vector: Tensor) -> Tensor:
        """Return the mean of a vector over all workers, sent as it is, while no exchange is in flight."""
        total = vector.clone()
        self.reduce(total)
        self.wait()
        return total.div_(self.workers)

    def collect(self) -> dict[str, Tensor]:
        """Return the tensors that the next exchange depends on, while none is in flight."""
        return {} if self.residual is None else {"residual": self.residual}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load what `collect` returned; what was saved with other settings is left out."""
        for name, tensor in self.collect().items():
            if name in saved and saved[name].shape == tensor.shape:
                tensor.copy_(saved[name])


class Bf16Exchange(Exchange):
    """Exchange in bfloat16: 2 n bytes. The sum is of bfloat16, too, and its rounding is lost."""

    lossy = True

    def encode(self, vector: Tensor) -> None:
        self.sum = vector.bfloat16()
        self.residual = vector - self.sum.to(vector)
        self.reduce(self.sum)

    def decode(self) -> Tensor:
        assert self.residual is not None
        return self.sum.to(self.residual).div_(self.workers)


class Int8Exchange(Exchange):
    """Exchange in int8, with a float32 scale for each parameter: n bytes and 4 for each parameter."""

    lossy = True

    def __init__(self, like: Tensor, workers: int, sizes: list[int]) -> None:
        """Parameters have `sizes` numbers, n in all."""
        super().__init__(like, workers)
        self.sizes, self.counts = sizes, torch.tensor(sizes, device=like.device)

    def encode(self, vector: Tensor) -> None:
        largest = torch.stack([part.abs().max() for part in vector.split(self.sizes)])
        scales = torch.where(largest > 0, largest / LEVELS, torch.ones_like(largest)).float()
        message = torch.cat([self.round_vector(vector, scales).view(torch.uint8), scales.view(torch.uint8)])
        self.arrived = self.gather(message)
        self.residual = vector - self.scale_message(message)

    def round_vector(self, vector: Tensor, scales: Tensor) -> Tensor:
        """Return a vector [n] in int8, in units of the scales of its parameters."""
        return (vector / scales.repeat_interleave(self.counts)).round_().clamp_(-LEVELS, LEVELS).to(torch.int8)

    def scale_message(self, message: Tensor) -> Tensor:
        """Return the vector [n] in a message."""
        length = sum(self.sizes)
        scales = message[length:].clone().view(torch.float32)
        return message[:length].view(torch.int8) * scales.repeat_interleave(self.counts)

    def decode(self) -> Tensor:
        return torch.stack([self.scale_message(message) for message in self.arrived]).mean(0)


class TopkExchange(Exchange):
    """Exchange of the k numbers largest in magnitude (Aji and Heafield 2017, arXiv 1704.05021).

    A message has k numbers with their positions in int32: 8 k bytes, with float64 12 k.
    """

    lossy = True

    def __init__(self, like: Tensor, workers: int, fraction: float) -> None:
        super().__init__(like, workers)
        self.count = max(1, round(fraction * len(like)))

    def encode(self, vector: Tensor) -> None:
        positions = vector.abs().topk(self.count, sorted=False).indices
        values = vector[positions]
        message = torch.cat([values.view(torch.uint8), positions.to(torch.int32).view(torch.uint8)])
        self.arrived = self.gather(message)
        vector[positions] = 0
        self.residual = vector

    def decode(self) -> Tensor:
        assert self.residual is not None
        total = torch.zeros_like(self.residual)
        for message in self.arrived:  # in the order of ranks, so that all add up alike
            values, positions = message.split([self.count * total.itemsize, self.count * 4])
            total.index_add_(0, positions.clone().view(torch.int32), values.clone().view(total.dtype))
        return total.div_(self.workers)
