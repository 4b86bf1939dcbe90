"""Exact evaluation, which scores each test sample once for any batch size and rank count."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common.data.samples import Images
from common.ranks.averaging import average_buffers
from common.ranks.rendezvous import World
from common.training.run_context import RunContext
from common.training.run_data import choose_loss
from configs.shared import TrainingExperiment

Predict = Callable[[Tensor | None, int], Tensor | None]


class StagedModel(Protocol):
    """Interface of a model that is split into stages, of which each rank holds one or several."""

    has_first_stage: bool
    """True if this rank holds the stage that receives the inputs."""

    @property
    def last_rank(self) -> int:
        """Rank that holds the last stage, and therefore knows the outputs and the loss."""

    @property
    def local_stages(self) -> Mapping[int, nn.Module]:
        """Stages of this rank by their numbers."""

    def predict(self, x: Tensor | None, count: int) -> Tensor | None:
        """Return the outputs of `count` inputs on the last rank, and None on all other ranks.

        `x` is None on ranks without the first stage. All ranks must call this method.
        """


def slice_batches(count: int, size: int) -> Iterable[slice]:
    """Return consecutive slices of length `size` (the last may be shorter) that cover `count` samples."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def slice_shard(count: int, size: int, rank: int, ranks: int) -> Iterable[slice]:
    """Return the slices of `count` samples that one of several ranks evaluates.

    Each slice contains at most `size` samples, and the lengths of all slices differ by at most one. Together, the
    slices of all ranks cover each sample once. Every rank gets the same number of slices, some of which may be empty,
    because a sharded model communicates in each forward pass.
    """
    total = ranks * -(-count // (size * ranks))  # number of slices, rounded up to a multiple of `ranks`
    return (slice(i * count // total, (i + 1) * count // total) for i in range(rank, total, ranks))


def score_test_set(
    predict: Predict, run: RunContext, *, inputs: bool = True, shard: tuple[int, int] = (0, 1)
) -> dict[str, float]:
    """Return the mean loss and, for class labels, the accuracy over all test samples, identical on every rank.

    `predict(x, n)` receives inputs [n, ...], or None if `inputs` is False. `predict` returns logits [n, classes] on
    the ranks that have logits, and None on all other ranks. `shard` (r, n) selects the r-th of n shards of the samples;
    by default, this rank evaluates all samples. The losses of all samples are summed before the mean is computed, so
    that batches of unequal size have the correct weight. Stop requests are handled between two batches. All ranks must
    call this function.
    """

    def report_progress(done: int, total: int) -> None:
        run.screen.show_progress("evaluation", done, total)
        run.stop_if_requested()

    sums = sum_scores(
        predict,
        run.test_set,
        run.device,
        loss=choose_test_loss(run.training_cfg, run.test_set),
        batch=run.training_cfg.eval_batch,
        dtype=run.dtype,
        inputs=inputs,
        shard=shard,
        after_batch=report_progress,
    )
    run.screen.end_progress("evaluation")
    dist.all_reduce(sums)
    return compute_scores(sums)


def score_replicated(model: nn.Module, run: RunContext, predict: Predict | None = None) -> dict[str, float]:
    """Return the test scores of a model that is replicated on all ranks.

    Each rank evaluates one shard. The running statistics of BatchNorm are averaged first, because each rank has trained
    on different samples. In the average, the weight of a rank is the size of its shard. `predict` computes the outputs
    (see `score_test_set`), by default by calling the model. All ranks must call this function.
    """
    average_buffers(model, weight=run.state.shard_weight if run.state else 1.0)
    return score_test_set(predict or (lambda x, _: model(x)), run, shard=run.shard)


def score_stages(model: StagedModel, run: RunContext, peers: World | None = None) -> dict[str, float]:
    """Return the test scores of a model that is split into stages.

    `peers` are the ranks that hold the same stages as this rank, if there are several replicas of the stages. Each
    replica evaluates one shard. The running statistics of BatchNorm are averaged over the replicas first. All ranks
    must call this function.
    """
    shard = (0, 1)
    if peers is not None:
        for stage in model.local_stages.values():
            average_buffers(stage, peers.group)
        shard = (peers.rank, peers.size)
    return score_test_set(model.predict, run, inputs=model.has_first_stage, shard=shard)


def choose_test_loss(cfg: TrainingExperiment, test: Images) -> Callable[..., Tensor]:
    """Return the loss of an evaluation: the training loss, or cross-entropy if training draws targets for classes."""
    draws_targets = test.has_labels and cfg.loss == "mse"
    return F.cross_entropy if draws_targets else choose_loss(cfg, test)


@torch.no_grad()
def sum_scores(
    predict: Predict,
    test: Images,
    device: torch.device,
    *,
    loss: Callable[..., Tensor] = F.cross_entropy,
    batch: int,
    dtype: torch.dtype,
    inputs: bool = True,
    shard: tuple[int, int] = (0, 1),
    after_batch: Callable[[int, int], None] = lambda done, total: None,
) -> Tensor:
    """Return one rank's sums of losses, correct predictions, and samples, as a float64 tensor [3].

    The number of correct predictions is NaN unless the targets are class labels and the outputs have the shape [n,
    classes]. The parameters have the same meaning as in `score_test_set`. No process group is needed. After each batch,
    `after_batch(done, total)` is called: `done` is an estimate of the number of samples that all ranks have evaluated,
    and `total` is the number of test samples.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    rank, ranks = shard
    count = len(test)
    slices = list(slice_shard(count, batch, rank, ranks) if ranks > 1 else slice_batches(count, batch))
    for number, samples in enumerate(slices, 1):
        x = test.load_inputs(samples, device, dtype) if inputs else None
        logits = predict(x, samples.stop - samples.start)
        if logits is not None:
            y = test.load_targets(samples, device, dtype)
            # Autocast returns low-precision logits. In bf16, a sum of a thousand losses would be rounded to an integer.
            sums[0] += loss(logits.to(dtype), y, reduction="sum")
            has_classes = test.has_labels and logits.dim() == 2 and logits.shape[1] >= test.outputs
            sums[1] += (logits.argmax(1) == y).sum() if has_classes else math.nan
            sums[2] += len(y)
        after_batch(count * number // len(slices), count)
    return sums


def compute_scores(sums: Tensor) -> dict[str, float]:
    """Compute the mean loss and, if known, the accuracy from the sums that `sum_scores` returns."""
    loss, correct, count = sums.tolist()
    accuracy = {} if math.isnan(correct) else {"test_accuracy": correct / count}
    return {"test_loss": loss / count, **accuracy, "test_samples": int(count)}


def measure_accuracy(
    model: nn.Module, test: Images, device: torch.device, *, batch: int, dtype: torch.dtype
) -> float | None:
    """Return the accuracy (0 to 1) over all test samples, computed by this rank alone.

    Returns None if the outputs are not scores of classes. The model remains in its current mode, training or eval.
    """

    def compute_no_loss(outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        return outputs.new_zeros(())

    sums = sum_scores(lambda x, _: model(x), test, device, loss=compute_no_loss, batch=batch, dtype=dtype)
    return compute_scores(sums).get("test_accuracy")
