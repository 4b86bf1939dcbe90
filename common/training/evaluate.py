"""Exact evaluation: every test sample once, whatever the batch size and the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common.data.loader import Images
from common.distributed import sync_batchnorm
from common.training.run_context import RunContext

Predict = Callable[[Tensor | None, int], Tensor | None]


def batches(count: int, size: int) -> Iterable[slice]:
    """Consecutive slices that cover `count` samples; the last one may be smaller."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def shards(count: int, size: int, rank: int, ranks: int) -> Iterable[slice]:
    """The slices of `count` samples that one of several ranks takes, at most `size` long.

    All slices of all ranks cover each sample once and differ in length by one at most. Every rank gets as many slices
    as any other, empty ones if need be: a sharded model communicates in each forward.
    """
    pieces = ranks * -(-count // (size * ranks))
    return (slice(i * count // pieces, (i + 1) * count // pieces) for i in range(rank, pieces, ranks))


def classify(
    predict: Predict, run: RunContext, *, inputs: bool = True, shard: tuple[int, int] = (0, 1)
) -> dict[str, float]:
    """Mean loss and accuracy over exactly all test samples of a run, the same numbers on every rank. All ranks call it.

    `predict(x, n)` gives logits [n, classes] where this rank has them, else None; `x` is None unless this rank wants
    `inputs`. With `shard` (r, n) it takes the r-th of n shards of the samples, else all. Sums, not means, are added up:
    batches of unequal size weigh by their samples. A stop request is answered between two batches.
    """
    size, dtype = run.cfg.eval_batch, run.dtype
    own = sum_scores(
        predict, run.test_set, run.device, batch=size, dtype=dtype, inputs=inputs, shard=shard, look=run.look
    )
    dist.all_reduce(own)
    return scores_of(own)


def classify_replicated(model: nn.Module, run: RunContext) -> dict[str, float]:
    """The same of a model that every rank holds: each takes its shard of the samples.

    BatchNorm's running statistics are averaged before: each rank's has seen other samples.
    """
    sync_batchnorm.average_buffers(model)
    return classify(lambda x, _: model(x), run, shard=run.shard)


@torch.no_grad()
def sum_scores(
    predict: Predict,
    test: Images,
    device: torch.device,
    *,
    batch: int,
    dtype: torch.dtype,
    inputs: bool = True,
    shard: tuple[int, int] = (0, 1),
    look: Callable[[], None] = lambda: None,
) -> Tensor:
    """One rank's part of `classify`, without messages: float64 [3], the sum of losses, right answers, samples.

    `look` is called after each batch.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    pieces = shards(len(test), batch, *shard) if shard[1] > 1 else batches(len(test), batch)
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


@torch.no_grad()
def accuracy_alone(model: nn.Module, test: Images, device: torch.device, *, batch: int, dtype: torch.dtype) -> float:
    """Accuracy over all test samples by this process alone, which need not be in a group. Leaves the model's mode."""
    correct = 0
    for piece in batches(len(test), batch):
        logits = model(test.load_inputs(piece, device, dtype))
        correct += int((logits.argmax(1) == test.load_targets(piece, device)).sum())
    return correct / len(test)
