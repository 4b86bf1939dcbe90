"""Exact evaluation: every test sample once, whatever the batch size and the number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common.data.loader import Images
from common.distributed import sync_batchnorm
from common.distributed.rendezvous import World


def batches(count: int, size: int) -> Iterable[slice]:
    """Consecutive slices that cover `count` samples; the last one may be smaller."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def shares(count: int, size: int, rank: int, ranks: int) -> Iterable[slice]:
    """The slices of `count` samples that one of several processes takes, at most `size` long.

    All slices of all processes cover each sample once and differ in length by one at most. Every process
    gets as many slices as any other, empty ones if need be: a sharded model communicates in each forward.
    """
    pieces = ranks * -(-count // (size * ranks))
    return (slice(i * count // pieces, (i + 1) * count // pieces) for i in range(rank, pieces, ranks))


def classify(
    predict: Callable[[Tensor | None, int], Tensor | None],
    test: Images,
    world: World,
    *,
    batch: int,
    dtype: torch.dtype,
    inputs: bool = True,
    share: tuple[int, int] = (0, 1),
    look: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Mean loss and accuracy over exactly all test samples, the same numbers on every process.

    `predict(x, n)` gives logits [n, classes] where this process has them, else None; `x` is None unless
    this process wants `inputs`. With `share` = (r, n) it takes the r-th of n shares of the samples, else all.
    Sums, not means, are added up: batches of unequal size weigh by their samples. `look` is called after each batch.
    """
    sums = add_up(predict, test, world.device, batch=batch, dtype=dtype, inputs=inputs, share=share, look=look)
    dist.all_reduce(sums)
    return scores_of(sums)


@torch.no_grad()
def add_up(
    predict: Callable[[Tensor | None, int], Tensor | None],
    test: Images,
    device: torch.device,
    *,
    batch: int,
    dtype: torch.dtype,
    inputs: bool = True,
    share: tuple[int, int] = (0, 1),
    look: Callable[[], None] = lambda: None,
) -> Tensor:
    """The part of one process in `classify`, without any message: float64 [sum of losses, right answers, samples]."""
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    pieces = shares(len(test), batch, *share) if share[1] > 1 else batches(len(test), batch)
    for piece in pieces:
        x = test.load_inputs(piece, device, dtype) if inputs else None
        logits = predict(x, piece.stop - piece.start)
        if logits is not None:
            y = test.load_targets(piece, device)
            # autocast gives logits in few bits: summed up in bf16, a thousand losses would be a whole number
            sums[0] += F.cross_entropy(logits.to(dtype), y, reduction="sum")
            sums[1] += (logits.argmax(1) == y).sum()
            sums[2] += len(y)
        look()
    return sums


def scores_of(sums: Tensor) -> dict[str, float]:
    """The scores out of the sums over all test samples."""
    loss, correct, count = sums.tolist()
    return {"test_loss": loss / count, "test_accuracy": correct / count, "test_samples": int(count)}


def classify_shared(
    model: nn.Module,
    test: Images,
    world: World,
    *,
    batch: int,
    dtype: torch.dtype,
    look: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """The same of a model that every process holds: each takes its share of the samples. Leaves it in eval mode."""
    sync_batchnorm.average_buffers(model)  # each process's BatchNorm has seen other samples
    model.eval()
    share = (world.rank, world.size)
    return classify(lambda x, _: model(x), test, world, batch=batch, dtype=dtype, share=share, look=look)


@torch.no_grad()
def accuracy_alone(model: nn.Module, test: Images, device: torch.device, *, batch: int, dtype: torch.dtype) -> float:
    """Accuracy over all test samples by this process alone, which need not be in a group. Leaves the model's mode."""
    correct = 0
    for piece in batches(len(test), batch):
        logits = model(test.load_inputs(piece, device, dtype))
        correct += int((logits.argmax(1) == test.load_targets(piece, device)).sum())
    return correct / len(test)
