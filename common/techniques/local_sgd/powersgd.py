"""PowerSGD: exchange of low-rank approximations of matrices (Vogels et al. 2019, arXiv 1905.13727)."""

from __future__ import annotations

import torch
from torch import Tensor

from common.techniques.local_sgd.exchange import Exchange


class PowerSgdExchange(Exchange):
    """Exchange of each matrix as a low-rank product P Q^T.

    A matrix [a, b] of rank r is approximated by P [a, r] and Q [b, r], so each worker sends (a + b) r values. A
    parameter with more than two dimensions is flattened to a matrix whose rows correspond to the first dimension.
    Vectors are sent uncompressed. A matrix is also sent uncompressed if P and Q together are not smaller than the
    matrix. Each exchange starts from the Q of the previous exchange. `begin_exchange` starts the all-reduce of P;
    `finish_exchange` performs the all-reduce of Q.
    """

    lossy = True

    def __init__(self, like: Tensor, workers: int, shapes: list[torch.Size], rank: int, seed: int) -> None:
        """Prepare exchanges of parameters with these `shapes`, which have n elements in total.

        `seed` initializes the matrices Q and must be the same on all workers.
        """
        super().__init__(like, workers)
        self.shapes: list[tuple[int, int]] = []
        self.ranks: list[int] = []
        """Rank r with which each matrix is approximated; 0 if the matrix is sent uncompressed."""
        self.widths: list[int] = []
        """Number of elements of each matrix Q."""
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
        """Elements of all matrices Q, concatenated into one vector."""

    def split_q_matrices(self) -> list[Tensor]:
        """Return the matrices Q as views [b, r] of one vector; the shape is [b, 0] for uncompressed parameters."""
        parts = zip(self.right.split(self.widths), self.shapes, self.ranks, strict=True)
        return [part.view(columns, rank) for part, (_, columns), rank in parts]

    def view_as_matrices(self, vector: Tensor) -> list[Tensor]:
        """Return the parameters in a vector [n] as matrix views [a, b]."""
        return [part.view(shape) for part, shape in zip(vector.split(self.sizes), self.shapes, strict=True)]

    def compress_and_send(self, vector: Tensor) -> None:
        self.vector = vector
        parts = []
        for matrix, right in zip(self.view_as_matrices(vector), self.split_q_matrices(), strict=True):
            part = matrix @ right if right.numel() else matrix
            parts.append(part.flatten())
        self.part_sizes = [len(part) for part in parts]
        self.sum = torch.cat(parts)
        self.start_all_reduce(self.sum)

    def decompress_mean(self) -> Tensor:
        matrices = self.view_as_matrices(self.vector)
        rights = self.split_q_matrices()
        means = (self.sum / self.workers).split(self.part_sizes)

        # Orthogonalize each P and update each Q. Uncompressed matrices do not change.
        lefts = []
        for matrix, mean, right in zip(matrices, means, rights, strict=True):
            left = mean.view(len(matrix), -1)
            if right.numel():
                left = torch.linalg.qr(left).Q
                right.copy_(matrix.T @ left)
            lefts.append(left)
        if len(self.right):
            self.start_all_reduce(self.right)
            self.wait_for_collectives()
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

    def collect_state(self) -> dict[str, Tensor]:
        return super().collect_state() | {"right": self.right}
