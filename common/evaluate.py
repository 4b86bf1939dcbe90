"""Exact evaluation: every test sample once, whatever the batch size and the number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from common.data import Images
from common.launch import World


def batches(count: int, size: int) -> Iterable[slice]:
    """Consecutive slices that cover `count` samples; the last one may be smaller."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


@torch.no_grad()
def classify(
    predict: Callable[[Tensor | None, int], Tensor | None],
    test: Images,
    world: World,
    *,
    batch: int,
    dtype: torch.dtype,
    inputs: bool = True,
) -> dict[str, float]:
    """Mean loss and accuracy over exactly all test samples, the same numbers on every process.

    `predict(x, n)` gives logits [n, classes] where this process has them, else None; `x` is None unless
    this process wants `inputs`. Sums, not means, are added up: batches of unequal size weigh by their samples.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)
    for piece in batches(len(test), batch):
        x = test.inputs(piece, world.device, dtype) if inputs else None
        logits = predict(x, piece.stop - piece.start)
        if logits is not None:
            y = test.targets(piece, world.device)
            sums[0] += F.cross_entropy(logits, y, reduction="sum")
            sums[1] += (logits.argmax(1) == y).sum()
            sums[2] += len(y)
    dist.all_reduce(sums)
    loss, correct, count = sums.tolist()
    return {"test_loss": loss / count, "test_accuracy": correct / count, "test_samples": int(count)}
