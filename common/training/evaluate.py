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


def slice_batches(count: int, size: int) -> Iterable[slice]:
    """Return consecutive slices that cover `count` samples; the last one may be smaller."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def slice_shard(count: int, size: int, rank: int, ranks: int) -> Iterable[slice]:
    """Return the slices of `count` samples that one of several ranks takes, at most `size` long.

    All slices of all ranks cover each sample once and differ in length by one at most. Every rank gets as many slices
    as any other, empty ones if need be: a sharded model communicates in each forward.
    """
    total = ranks * -(-count // (size * ranks))
    return (slice(i * count // total, (i + 1) * count // total) for i in range(rank, total, ranks))


def score_test_set(
    predict: Predict, run: RunContext, *, inputs: bool = True, shard: tuple[int, int] = (0, 1)
) -> dict[str, float]:
    """Return mean loss and accuracy over exactly all test samples, the same on every rank. All ranks call it.

    `predict(x, n)` gets inputs [n, ...], or None unless this rank wants `inputs`, and returns logits [n, classes] where
    this rank has them, else None. With `shard` (r, n) it takes the r-th of n shards of the samples, else all. Sums, not
    means, are added up: batches of unequal size weigh by their samples. A stop request is answered between two batches.
    """

    def poll(done: int, total: int) -> None:
        run.screen.show_progress("evaluation", done, total)
        run.stop_if_requested()

    batch, dtype = run.cfg.eval_batch, run.dtype
    own = sum_scores(
        predict, run.test_set, run.device, batch=batch, dtype=dtype, inputs=inputs, shard=shard, after_batch=poll
    )
    run.screen.end_progress("evaluation")
    dist.all_reduce(own)
    return compute_scores(own)


def score_replicated(model: nn.Module, run: RunContext) -> dict[str, float]:
    """Return the scores of a model that every rank holds: each takes its shard of the samples. All ranks call it.

    BatchNorm's running statistics are averaged before: each rank's have seen other samples, as many as its shard has.
    """
    sync_batchnorm.average_buffers(model, weight=run.state.weight if run.state else 1.0)
    return score_test_set(lambda x, _: model(x), run, shard=run.shard)


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
    after_batch: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """Return one rank's part of `score_test_set`: float64 [3], the sum of losses, right answers, samples.

    It needs no process group. `after_batch(done, total)` is called after each batch with the samples that all ranks
    have done by then, if they are as fast, and all there are.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    slices = slice_shard(len(test), batch, *shard) if shard[1] > 1 else slice_batches(len(test), batch)
    slices = list(slices)
    for number, samples in enumerate(slices, 1):
        x = test.load_inputs(samples, device, dtype) if inputs else None
        logits = predict(x, samples.stop - samples.start)
        if logits is not None:
            y = test.load_targets(samples, device)
            # autocast gives logits in few bits: summed up in bf16, a thousand losses would be a whole number
            sums[0] += F.cross_entropy(logits.to(dtype), y, reduction="sum")
            sums[1] += (logits.argmax(1) == y).sum()
            sums[2] += len(y)
        after_batch(len(test) * number // len(slices), len(test))
    return sums


def compute_scores(sums: Tensor) -> dict[str, float]:
    """Return the scores from the sums of `sum_scores` over all test samples."""
    loss, correct, count = sums.tolist()
    return {"test_loss": loss / count, "test_accuracy": correct / count, "test_samples": int(count)}


def measure_accuracy(model: nn.Module, test: Images, device: torch.device, *, batch: int, dtype: torch.dtype) -> float:
    """Return the accuracy (0 to 1) over all test samples, by this rank alone. The model stays in its mode."""
    sums = sum_scores(lambda x, _: model(x), test, device, batch=batch, dtype=dtype)
    return compute_scores(sums)["test_accuracy"]
