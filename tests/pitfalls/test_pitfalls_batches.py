"""The mistakes about the batches of several ranks: what they really do, and what is right instead."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common.techniques.data_parallel.shards import StepTimeModel, choose_shard_sizes, predict_slowest_rank_seconds
from common.training import learning_rate
from configs.shared import Optim
from tests.harness.batch_pitfalls import BATCH, SAMPLES
from tests.harness.ddp_pitfalls import made

STEPS = SAMPLES // BATCH


@pytest.fixture(scope="module")
def epochs(cache: Path) -> list[dict[str, Any]]:
    """What each of two ranks found in an epoch with each mistake and without."""
    return list(made("epochs", module="batch_pitfalls", CACHE=str(cache))["epochs"])


def drawn(epochs: list[dict[str, Any]], name: str) -> list[list[int]]:
    """The samples of each step, over both ranks."""
    return [[*one, *two] for one, two in zip(*(rank[name]["seen"] for rank in epochs), strict=True)]


def test_without_a_sampler_two_ranks_do_the_work_of_one(epochs: list[dict[str, Any]]) -> None:
    steps = drawn(epochs, "no sampler")
    assert [(len(step), len(set(step))) for step in steps] == [(2 * BATCH, BATCH)] * STEPS, "each sample is there twice"
    for rank in epochs:
        assert sorted(chain(*rank["no sampler"]["seen"])) == list(range(SAMPLES)), "every rank passes through all"
        assert rank["no sampler"]["apart"][0] < 1e-12, "one process with the batch of one rank learns the same"
    right = drawn(epochs, "right")
    assert [(len(step), len(set(step))) for step in right] == [(BATCH, BATCH)] * STEPS
    assert sorted(chain(*right)) == list(range(SAMPLES)), "both together pass through all"


def test_the_batch_of_a_rank_is_not_that_of_a_step(epochs: list[dict[str, Any]]) -> None:
    steps = drawn(epochs, "batch per rank")
    assert [len(set(step)) for step in steps] == [2 * BATCH] * (STEPS // 2), "twice the batch, in half as many steps"
    for rank in epochs:
        twice, same = rank["batch per rank"]["apart"]
        assert twice < 1e-12 < 1e-3 < same, "one process with twice the batch does that, and not one with the batch"
        assert [len(step) for step in rank["right"]["seen"]] == [BATCH // 2] * STEPS
        assert rank["right"]["apart"][0] < 1e-12, "one process with the batch does that"
    rule = Optim(lr=0.1, base_batch=BATCH, decay="constant")  # where the larger batch is wanted
    assert learning_rate.compute_learning_rate(rule, 0, STEPS, 2 * BATCH) == pytest.approx(0.2)


def test_the_mean_of_unequal_shards_means_is_another_gradient() -> None:
    x, y = torch.randn(24, 5, dtype=torch.float64), torch.randint(3, (24,))
    weight = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, weight)[0]

    whole = gradient(F.cross_entropy(x @ weight.T, y))
    shards = list(zip(x.split([18, 6]), y.split([18, 6]), strict=True))
    means = [gradient(F.cross_entropy(own @ weight.T, labels)) for own, labels in shards]
    sums = [gradient(F.cross_entropy(own @ weight.T, labels, reduction="sum") / 12) for own, labels in shards]
    assert (sum(means) / 2 - whole).abs().max() > 1e-3
    assert (sum(sums) / 2 - whole).abs().max() < 1e-12, "divided by the mean shard, as DDP takes the mean of the ranks"


def test_statistics_of_the_smallest_shard_are_not_those_of_the_batch() -> None:
    """The mean of the squared distance from the whole batch's mean, over many batches."""
    x = torch.randn(1000, 24, dtype=torch.float64)
    large, small, whole = x[:, :21].mean(1), x[:, 21:].mean(1), x.mean(1)

    def distance(found: torch.Tensor) -> float:
        return (found - whole).square().mean().item()

    assert distance((21 * large + 3 * small) / 24) < 1e-12
    assert distance(small) > 2 * distance((large + small) / 2) > 0.05
    one, three = nn.BatchNorm1d(1, momentum=1.0).double(), nn.BatchNorm1d(1, momentum=1.0).double()
    one(small[:, None]), three(large[:, None])
    assert one.running_var > 3 * three.running_var, "the fewer samples, the more a shard's mean moves"  # type: ignore[operator]


def test_shards_of_a_busy_moment_do_not_fit_a_quiet_run() -> None:
    quiet = [StepTimeModel(0.0, 0.001), StepTimeModel(0.0, 0.001)]
    disturbed = choose_shard_sizes([quiet[0], quiet[1].rescale_line(48, 3 * 0.048)], 96)
    assert predict_slowest_rank_seconds(quiet, disturbed) == pytest.approx(
        1.5 * predict_slowest_rank_seconds(quiet, (48, 48))
    )
    corrected = [speed.rescale_line(count, count * 0.001) for speed, count in zip(quiet, disturbed, strict=True)]
    assert choose_shard_sizes(corrected, 96) == (48, 48), "what the steps take of late is the truth"
