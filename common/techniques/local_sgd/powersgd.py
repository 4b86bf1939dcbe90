"""PowerSGD: low-rank approximation of each matrix in the mean vector (Vogels et al. 2019, arXiv 1905.13727)."""

from __future__ import annotations

import torch
from torch import Tensor

from common.techniques.local_sgd.exchange import Exchange


class PowerSgdExchange(Exchange):
    """Exchange of matrices [a, b] as P Q^T with P [a, r] and Q [b, r], r being the rank: (a + b) r numbers.

    A parameter of more than two dimensions is a matrix whose rows are its first dimension. Vectors, and matrices for
    which P and Q are not smaller, are sent uncompressed. Q starts with its value after the last exchange. The first of
    the two all-reduces starts at once, the second when the exchange is finished.
    """

    lossy = True

    def __init__(self, like: Tensor, workers: int, shapes: list[torch.Size], rank: int, seed: int) -> None:
        """Parameters have `shapes` and n numbers in total; `seed` is the same on all workers."""
        super().__init__(like, workers)
        self.shapes: list[tuple[int, int]] = []
        self.ranks: list[int] = []
        """Rank of each matrix; 0 if it is sent uncompressed."""
        self.widths: list[int] = []
        """Number of entries of each Q."""
        for shape in shapes:
            rows = shape[0] if len(shape) > 1 else 1
            columns = shape.numel() // rows
            is_smaller = rank * (rows + columns) < rows * columns
            self.shapes.append((rows, columns))
            self.ranks.append(rank if is_smaller else 0)
            self.widths.append(columns * self.ranks[-1])
        self.sizes = [shape.numel() for shape in shapes]
        generator = torch.Generator().manual_seed(seed)
        self.right = torch.randn(sum(self.widths), generator=generator, dtype=like.dtype).to(like.device)
        """The entries of all Q, one matrix after the other."""

    def split_right(self) -> list[Tensor]:
        """Return the matrices Q [b, r] as views; [b, 0] for uncompressed parameters."""
        parts = zip(self.right.split(self.widths), self.shapes, self.ranks, strict=True)
        return [part.view(columns, rank) for part, (_, columns), rank in parts]

    def split_matrices(self, vector: Tensor) -> list[Tensor]:
        """Return the parameters of a vector [n] as views [a, b]."""
        return [part.view(shape) for part, shape in zip(vector.split(self.sizes), self.shapes, strict=True)]

    def encode(self, vector: Tensor) -> None:
        self.vector = vector
        parts = []
        for matrix, right in zip(self.split_matrices(vector), self.split_right(), strict=True):
            part = matrix @ right if right.numel() else matrix
            parts.append(part.flatten())
        self.part_sizes = [len(part) for part in parts]
        self.sum = torch.cat(parts)
        self.reduce(self.sum)

    def decode(self) -> Tensor:
        matrices = self.split_matrices(self.vector)
        rights = self.split_right()
        means = (self.sum / self.workers).split(self.part_sizes)

        # Orthogonalise each P, and update Q. Uncompressed matrices are left as they are.
        lefts = []
        for matrix, mean, right in zip(matrices, means, rights, strict=True):
            left = mean.view(len(matrix), -1)
            if right.numel():
                left = torch.linalg.qr(left).Q
                right.copy_(matrix.T @ left)
            lefts.append(left)
        if len(self.right):
            self.reduce(self.right)
            self.wait()
            self.right.div_(self.workers)

        products = []
        for left, right in zip(lefts, rights, strict=True):
            product = left @ right.T if right.numel() else left
            products.append(product.flatten())
        total = torch.cat(products)
        self.residual = self.vector - total
        for part, rank in zip(self.residual.split(self.sizes), self.ranks, strict=True):
            if not rank:
                part.zero_()
        return total

    def collect(self) -> dict[str, Tensor]:
        return super().collect() | {"right": self.right}
