"""PowerSGD: each matrix of the mean vector as a product of two thin ones (Vogels et al. 2019, arXiv 1905.13727)."""

from __future__ import annotations

import torch
from torch import Tensor

from common.training.local_sgd.exchange import Exchange


class PowerSgdExchange(Exchange):
    """Exchange of matrices [a, b] as P Q^T with P [a, r] and Q [b, r], r being the rank: (a + b) r numbers.

    A parameter of more dimensions is a matrix with the first one as rows. Vectors, and matrices of which the product is
    not smaller, are sent as they are. Q begins as the one of the last exchange. The first of the two all-reduces begins
    at once, the second when the exchange is finished.
    """

    lossy = True

    def __init__(self, like: Tensor, workers: int, shapes: list[torch.Size], rank: int, seed: int) -> None:
        """Parameters have `shapes`, and n numbers in all; `seed` is the same on all workers."""
        super().__init__(like, workers)
        self.shapes = [(shape[0], shape[1:].numel()) if len(shape) > 1 else (1, shape.numel()) for shape in shapes]
        self.sizes = [rows * columns for rows, columns in self.shapes]
        self.ranks = [rank if rank * (a + b) < a * b else 0 for a, b in self.shapes]  # 0: sent as it is
        widths = [columns * r for (_, columns), r in zip(self.shapes, self.ranks, strict=True)]
        draw = torch.Generator().manual_seed(seed)
        self.right = torch.randn(sum(widths), generator=draw, dtype=like.dtype).to(like.device)
        """The entries of all Q, one matrix after the other."""
        self.widths = widths

    def split_right(self) -> list[Tensor]:
        """Return the matrices Q [b, r] as views; [b, 0] where a parameter is sent as it is."""
        parts = self.right.split(self.widths)
        return [part.view(b, r) for part, (_, b), r in zip(parts, self.shapes, self.ranks, strict=True)]

    def split_matrices(self, vector: Tensor) -> list[Tensor]:
        """Return the parameters of a vector [n] as views [a, b]."""
        return [part.view(shape) for part, shape in zip(vector.split(self.sizes), self.shapes, strict=True)]

    def encode(self, vector: Tensor) -> None:
        self.vector = vector
        pairs = zip(self.split_matrices(vector), self.split_right(), self.ranks, strict=True)
        self.sum = torch.cat([(matrix @ right if rank else matrix).flatten() for matrix, right, rank in pairs])
        self.reduce(self.sum)

    def decode(self) -> Tensor:
        left = list[Tensor]()
        sizes = [a * (rank or b) for (a, b), rank in zip(self.shapes, self.ranks, strict=True)]
        for part, (rows, _), rank in zip((self.sum / self.workers).split(sizes), self.shapes, self.ranks, strict=True):
            mean = part.view(rows, -1)
            left.append(torch.linalg.qr(mean).Q if rank else mean)
        for matrix, one, right in zip(self.split_matrices(self.vector), left, self.split_right(), strict=True):
            if right.numel():
                right.copy_(matrix.T @ one)
        if len(self.right):
            self.reduce(self.right)
            self.wait()
            self.right.div_(self.workers)
        products = zip(left, self.split_right(), strict=True)
        total = torch.cat([(one @ right.T if right.numel() else one).flatten() for one, right in products])
        self.residual = self.vector - total
        for part, rank in zip(self.residual.split(self.sizes), self.ranks, strict=True):
            if not rank:
                part.zero_()
        return total

    def collect(self) -> dict[str, Tensor]:
        return super().collect() | {"right": self.right}
