"""Exchange of a vector between all workers, whose result is its mean over them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """Exchange of a vector [n] as it is: one all-reduce."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.bytes_sent = 0
        """Bytes that this worker has handed over to collectives."""
        self.work: dist.Work | None = None
        self.sum: Tensor

    def begin(self, vector: Tensor) -> None:
        """Begin to send a vector [n], which stays as it is. All workers call it."""
        self.sum = vector.clone()
        self.work = self.send(self.sum)

    def finish(self) -> Tensor:
        """Wait until the exchange is over; return the mean [n], the same on all workers. All of them call it."""
        assert self.work is not None
        self.work.wait()
        self.work = None
        return self.sum.div_(self.workers)

    def send(self, values: Tensor) -> dist.Work:
        """Begin to add up tensors of all workers in place, and count the bytes."""
        self.bytes_sent += values.nbytes
        work = dist.all_reduce(values, async_op=True)
        assert work is not None
        return work

    @torch.no_grad()
    def average(self, vector: Tensor) -> Tensor:
        """Return the mean of a vector [n] over all workers, sent as it is. All of them call it."""
        total = vector.clone()
        self.send(total).wait()
        return total.div_(self.workers)
